"""What a rank reports: records, memory, steps, stacks, exceptions."""
