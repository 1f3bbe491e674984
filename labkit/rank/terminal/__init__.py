"""What a rank prints, and what the user types for it."""
