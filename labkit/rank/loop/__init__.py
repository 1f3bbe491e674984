"""What a loop is given for a step, and what is recorded of it."""
