"""Servers keep the parameters; workers pull them and push gradients."""
