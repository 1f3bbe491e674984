"""One trial of a study: what it tries, how it does, and when it is stopped."""
