"""Pipeline parallelism: the strategy `pipeline`."""
