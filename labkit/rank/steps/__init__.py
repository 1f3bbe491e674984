"""What a step goes through: the optimizer that the loop sees, and what watches it."""
