"""What a rank reports: records, stacks, exceptions."""
