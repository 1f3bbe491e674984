"""The device mesh of a run, and the ranks along its axes."""
