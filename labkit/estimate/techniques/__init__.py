"""What each technique keeps and gathers, by arithmetic on one traced step."""
