"""The wing in each engine: its process group, its cells, its telemetry."""
