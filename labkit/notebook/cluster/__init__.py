"""Engines of ipyparallel: placed, started, watched, ended, and how each of them died."""
