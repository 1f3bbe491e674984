"""Runs a model's own `forward` on ranks that have its layers in stages."""
