"""What an optimizer has to be like where it gets parts, or copies, of parameters."""
