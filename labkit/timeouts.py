"""How long labkit waits for what, in seconds, and why."""

CALL_S = 60.0
"""A call that ranks answer quickly: to install, to join a group, to look up a name."""
SILENCE_S = 60.0
"""A call of any length ends where its rank has answered nothing else for so long."""
ASK_S = 1.0
"""From one answer of such a rank to the next question."""
