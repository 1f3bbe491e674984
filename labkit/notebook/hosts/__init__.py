"""Other hosts: how programs are started there, what they have, and their engines."""
