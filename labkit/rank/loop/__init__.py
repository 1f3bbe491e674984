"""What a loop is given for a step, what is recorded of it, what its code shows."""
