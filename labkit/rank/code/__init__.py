"""Reads in a cell's text what it does with several ranks, or in parts of a batch."""
