"""Where ranks are: their stacks, hangs, and the table of `%dist_status`."""
