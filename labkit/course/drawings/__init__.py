"""The pictures of the notebooks."""
