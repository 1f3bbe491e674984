"""Fully sharded data parallelism: the strategies `fsdp` and `hsdp`."""
