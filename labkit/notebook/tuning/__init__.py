"""Studies: many training runs on the same ranks, to find the best parameters."""
