"""Hosts by an ipyparallel profile: whatever its launcher submits to, or logs in to."""
