"""What runs beside cells in the notebook's kernel: output, interrupts, background jobs."""
