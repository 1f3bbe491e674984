"""In the notebook's kernel, beside its cells: output, interrupts, background jobs."""
