"""Engines of ipyparallel: placed, started, watched, ended, and how each one died."""
