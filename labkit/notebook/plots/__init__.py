"""From a history to a picture: matplotlib, and nothing that moves."""
