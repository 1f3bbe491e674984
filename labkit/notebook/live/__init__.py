"""What is shown under a cell while it runs: the picture, its render process, the
widget.
"""

VIEWS = ("image", "widget")
"""What `--live` names."""
