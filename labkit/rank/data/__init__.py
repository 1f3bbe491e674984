"""Global batches: their order, each rank's share of them, on its device."""
