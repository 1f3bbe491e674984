"""Records some steps of a run with torch.profiler."""
