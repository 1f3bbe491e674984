"""The losses of a loop: noticed, and what each is a mean or a sum over."""
