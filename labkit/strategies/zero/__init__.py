"""ZeRO-1/2/3, with DeepSpeed."""
