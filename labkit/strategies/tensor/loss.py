"""The loss of logits that are split over classes."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor.parallel import loss_parallel

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import LOG_SOFTMAX_BACKWARD
from labkit.compat.c10d import NLL_BACKWARD
from labkit.compat.c10d import handlers_of_dtensor
from labkit.compat.c10d import local_part
from labkit.compat.torch import storage_key

OTHER_USE = (
    "the loss computes log_softmax of logits that are split over classes, and uses it "
    "besides cross_entropy, or twice: torch's loss_parallel has no gradient for that. "
    'Leave out "loss_parallel", or use F.cross_entropy alone for each part of the loss'
)


@contextlib.contextmanager
def loss_of_split_logits() -> Iterator[None]:
    """`loss_parallel`, within which UnsupportedLoopError is raised in place of a wrong
    gradient: its `nll_loss` gives that of `log_softmax` too, whose own backward hands
    on what it is given, also what is of something else.
    """
    given: set[int] = set()
    """The storages of what `nll_loss` has given, and `log_softmax` not yet taken."""

    def noted(give: Callable[..., Any], *args: Any) -> Any:
        gradient = give(*args)
        given.add(key_of(gradient))
        return gradient

    def checked(take: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
        key = key_of(args[0])
        if key not in given:  # or a sum, with another storage
            given.clear()
            raise UnsupportedLoopError(OTHER_USE)
        given.remove(key)
        return take(op, args, kwargs)

    handlers = handlers_of_dtensor()
    if LOG_SOFTMAX_BACKWARD in handlers:  # for another model: it is for all
        yield
        return
    with loss_parallel():
        for op in NLL_BACKWARD:
            handlers[op] = functools.partial(noted, handlers[op])
        op = LOG_SOFTMAX_BACKWARD
        handlers[op] = functools.partial(checked, handlers[op])
        yield


def key_of(gradient: Any) -> int:
    return storage_key(local_part(gradient).untyped_storage())
