"""Runs a cell or a training run to completion on the ranks."""
