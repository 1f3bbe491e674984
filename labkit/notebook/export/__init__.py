"""Writes a run, with the cells that it needs, as a script for torchrun."""
