"""The process group: joined, released, re-created, and what is bound to it."""
