"""What a user's loop does: its losses, and what only its code shows."""
