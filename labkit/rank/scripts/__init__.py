"""A script on this rank, which finds a process as torchrun would start it."""
