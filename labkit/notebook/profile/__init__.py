"""What ranks have recorded of some steps: one trace, and why they are slow in words."""
