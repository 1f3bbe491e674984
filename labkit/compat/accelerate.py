"""What labkit takes of Accelerate that is private."""

import sys
from typing import Any

from labkit.compat.gate import Gate

GATE = Gate("accelerate")


@GATE.needs(
    "accelerate.state:AcceleratorState._reset_state",
    "accelerate.state:GradientState._reset_state",
)
def forget_state() -> None:
    """Forget Accelerate's state, as the end of the launched processes would: the next
    `notebook_launcher` refuses where there is one."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
