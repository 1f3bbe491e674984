"""What a training step takes on this rank: memory, and bytes over the wire."""
