"""Labkit and its peers, driven alike: one small module each, one runner, one report."""
