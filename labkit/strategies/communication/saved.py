"""What a checkpoint has of gradients that were not sent."""

from collections.abc import Callable
from typing import Any

import torch

from labkit.json_files import parse
from labkit.strategies.communication.hook import Hook
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source

NOT_TAKEN = (
    "the checkpoint was taken by {num_ranks} ranks with --comm {method}; what they had "
    "not sent of their gradients is not taken over"
)


def saved_state(hook: Hook) -> tuple[Named, dict[str, Any]]:
    """This rank's residuals, by name, and what goes with them."""
    peers = hook.peers
    unsent = {} if hook.residuals is None else hook.residuals.named()
    tensors = {f"unsent.{peers.rank}.{name}": part for name, part in unsent.items()}
    facts = {"method": hook.method, "num_ranks": peers.size, "state": hook.state()}
    return tensors, facts


def restoring_state(
    hook: Hook | None, source: Source, facts: Any, note: Callable[[str], None]
) -> Restore:
    """What sets `hook` to what `saved_state` gave. ValueError where that is damaged;
    where it is of another method or number of ranks, it notes that instead."""
    try:
        method = parse(str, facts["method"])
        num_ranks = parse(int, facts["num_ranks"])
        state = parse(dict[str, int], facts["state"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the checkpoint is damaged: its record of --comm is not valid ({error}); "
            "load another checkpoint"
        ) from None
    has_residuals = any(name.startswith("unsent.") for name in source.tensors)
    if hook is None or (hook.method, hook.peers.size) != (method, num_ranks):
        text = NOT_TAKEN.format(num_ranks=num_ranks, method=method)
        return lambda: note(text) if has_residuals else None
    own = f"unsent.{hook.peers.rank}."
    unsent = {
        name: torch.empty(shape, dtype=dtype, device=hook.peers.device)
        for name, (shape, dtype) in source.tensors.items()
        if name.startswith(own)
    }
    named = {name.removeprefix(own): part for name, part in unsent.items()}
    if hook.residuals is not None:
        hook.residuals.check(named)

    def restore() -> None:
        source.fill(unsent)
        hook.set_state(state)
        if hook.residuals is not None:
            hook.residuals.set(named)

    return restore
