"""The wing in the notebook's kernel: starts ranks, runs cells on them, shows runs."""
