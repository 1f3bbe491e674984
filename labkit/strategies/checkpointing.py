"""Activation checkpointing: blocks compute again in the backward pass."""

import contextlib
import operator
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.checks import UnsupportedLoopError
from labkit.compat.deepspeed import is_of_deepspeed
from labkit.compat.torch import PARAMETERS
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_fake
from labkit.compat.torch import is_plain
from labkit.compat.torch import is_transformed
from labkit.compat.torch import num_changes
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import hand_back
from labkit.strategies.autograd.structures import holders_of
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.writes import has_values
from labkit.strategies.model.writes import watch_unseen
from labkit.strategies.options import has_running_statistics
from labkit.strategies.options import without_running_statistics
from labkit.strategies.own_state import OwnState
from labkit.strategies.prepared import blocks
from labkit.strategies.relay.elsewhere import is_elsewhere

NUM_PASSES = 3
"""In which a block is looked at: whether its forward pass changes what it has."""
MOST_SETTINGS = 100
"""Which are known of a block: each is looked at when it comes again."""
UNCHANGED = torch.Tensor | int | float | str | None
"""What a block cannot put anything into; what it writes into a tensor autograd sees."""

OTHERS = (
    "torch.func.functional_call gives the model other parameters for a forward pass, "
    "and --activation-checkpointing computes that again in the backward pass, when the "
    "model has its own again. Leave the option out for this loop"
)

ITERATES = (
    "a {name} has or is given an iterator, or a generator, and with "
    "--activation-checkpointing it is computed again in the backward pass, when it "
    "would take other items. Have the items themselves, in a list, or leave the option "
    "out for this loop"
)

WRITES = (
    "a {name} writes to a tensor that it is given, like an in-place ReLU, and with "
    "--activation-checkpointing it is computed again from that in the backward pass. "
    "Have it write to a copy, x = x.clone(), or to none (inplace=False), or leave the "
    "option out for this loop"
)

WRITES_OWN = (
    "a {name} writes to its parameters in its forward pass, and with "
    "--activation-checkpointing does so once more where it is computed again, in the "
    "backward pass. Write to them in the loop, after optimizer.step(), under "
    "torch.no_grad(), or leave the option out for this loop"
)

Settings = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes of each module of a block, and what they were that are numbers, words
or None."""


def checkpoint_activations(
    model: nn.Module, parts: Iterable[nn.Module] = ()
) -> list[Callable[[], None]]:
    """Keep only the inputs of the model's blocks; compute the rest again in backward.
    Of a model without blocks those of `parts`, or of the whole.

    The second pass finds what the block keeps, and what it is given, as the first did,
    and leaves it as it is then: a count of passes, a running mean, a list to append to.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost";
    `torch.utils.checkpoint`.
    """
    found = blocks(model) or [*parts] or [model]
    return [wrap_forward(block, _checkpointed) for block in found]


class Watch:
    """Whether a block keeps anything: it is looked at in its first passes, and in the
    first ones with other settings."""

    def __init__(self) -> None:
        self.is_over = self.keeps = False
        """Whether it is, with the last settings that it had; and what it has found."""
        self._num_passes: dict[Any, int] = {}

    def knows(self, settings: Any) -> bool:
        """Whether enough was seen of these, and the block keeps nothing."""
        return self._num_passes.get(settings, 0) >= NUM_PASSES and not self.keeps

    def note(self, settings: Any, *, has_changed: bool) -> None:
        self.keeps |= has_changed
        if len(self._num_passes) > MOST_SETTINGS:
            self._num_passes.clear()
        self._num_passes[settings] = self._num_passes.get(settings, 0) + 1
        self.is_over = self.knows(settings)


def _checkpointed(plain: Forward) -> Forward:
    watch = Watch()
    carefully = torch.compiler.disable(_checkpointed_carefully, recursive=False)

    def forward(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not torch.is_grad_enabled():
            return plain(block, *args, **kwargs)
        if not watch.is_over or any(not isinstance(x, UNCHANGED) for x in given):
            return carefully(watch, plain, block, args, kwargs)
        is_eager = not torch.compiler.is_compiling()
        used = [*block.parameters()] if is_eager else []
        if is_eager and (are_shapes((*given, *used)) or is_transformed()):
            return plain(block, *args, **kwargs)
        settings = settings_of(block) if is_eager else []
        if is_eager and not watch.knows(key_of(settings)):
            return carefully(watch, plain, block, args, kwargs)

        names = [*kwargs]

        def compute(*given: Any) -> Any:  # no `partial`: dynamo skips them
            if is_eager:
                check_parameters(block, used)
            count = len(given) - len(names)
            by_name = dict(zip(names, given[count:], strict=True))
            return plain(block, *given[:count], **by_name)

        options: dict[str, Any] = {"use_reentrant": False}
        if is_eager or any(map(has_running_statistics, block.modules())):
            # Only there, for dynamo compiles no checkpoint that has it.
            options["context_fn"] = partial(_contexts, block, settings)
        # Without keywords: autograd sees what is changed in place of the others alone.
        return checkpoint(compute, *given, **options)

    return forward


def settings_of(block: nn.Module) -> Settings:
    found = map(vars, block.modules())
    return [(attributes, plain_in(attributes)) for attributes in found]


def plain_in(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in attributes.items() if type(x) in _PLAIN}


_PLAIN = frozenset({bool, int, float, str, type(None)})


def key_of(settings: Settings, given: Iterable[Any] = ()) -> Any:
    """What tells these from others, and what a block is given from other kinds."""
    return (*(tuple(plain.items()) for _, plain in settings), *map(type, given))


@contextlib.contextmanager
def with_settings(settings: Settings) -> Iterator[None]:
    """Within it a block has those of its first pass: the loop may have set others, as
    by `model.eval()` before the backward pass."""
    found = [(each, before, plain_in(each)) for each, before in settings]
    changed = [each for each in found if each[1] != each[2]]
    for attributes, before, now in changed:
        set_names(attributes, now, before)
    try:
        yield
    finally:
        for attributes, before, now in changed:
            set_names(attributes, before, now)


def set_names(
    attributes: dict[str, Any], before: dict[str, Any], now: dict[str, Any]
) -> None:
    for name in before.keys() - now.keys():
        attributes.pop(name, None)
    attributes.update(now)


def check_parameters(block: nn.Module, used: list[nn.Parameter]) -> None:
    """UnsupportedLoopError where a block has others than in its first pass."""
    if not all(map(operator.is_, used, block.parameters())):
        raise UnsupportedLoopError(OTHERS)


def name_of(block: nn.Module) -> str:
    """That of its class, which `fully_shard` gives another one."""
    return type(block).__name__.removeprefix("FSDP")


def are_shapes(values: Iterable[Any]) -> bool:
    """Whether it is for their shapes that a block runs, as that of another rank: then
    nothing is kept."""
    return any(
        isinstance(each, torch.Tensor) and (each.is_meta or is_elsewhere(each))
        for each in values
    )


class Again(AbstractContextManager[None]):
    """A context of second passes, of which there may be several: with create_graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _contexts(block: nn.Module, settings: Settings) -> tuple[Any, Any]:
    """Contexts of a block's forward pass, and of its second one."""

    @contextlib.contextmanager
    def second() -> Iterator[None]:
        with with_settings(settings), without_running_statistics(block):
            yield

    return contextlib.nullcontext(), Again(second)


def _checkpointed_carefully(
    watch: Watch, plain: Forward, block: nn.Module, args: Any, kwargs: Any
) -> Any:
    leaves, spec = flatten((args, kwargs))
    used = [*block.parameters()]
    if are_shapes((*leaves, *used)) or is_transformed():
        return plain(block, *args, **kwargs)

    settings = settings_of(block)
    given = [each for each in leaves if not isinstance(each, UNCHANGED)]
    key = key_of(settings, given)
    own = holders_of(args, kwargs)

    def compute(*leaves: Any) -> Any:
        check_parameters(block, used)
        args, kwargs = unflatten([*leaves], spec)
        copies = holders_of(args, kwargs)
        return plain(block, *args, **kwargs), copies

    def contexts() -> tuple[Any, Any]:
        if watch.knows(key) or any(map(is_fake, leaves)):
            return _contexts(block, settings)
        before = state_of(block, given)
        if before.has_iterators:
            raise UnsupportedLoopError(ITERATES.format(name=name_of(block)))
        second = partial(_second, block, given, before, rewritten)
        return _first(watch, key, before), Again(second)

    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    before = [*map(num_changes, tensors)]
    look: Callable[[], tuple[bool, list[nn.Parameter]]] | None = None
    if not watch.knows(key) and not any(map(is_fake, leaves)):
        look = torch.compiler.disable(watch_writes)(tensors, used)
    rewritten: list[nn.Parameter] = []
    output, copies = checkpoint(
        compute, *leaves, use_reentrant=False, context_fn=contexts
    )
    is_written = before != [*map(num_changes, tensors)]
    if look is not None:
        is_unseen, rewritten[:] = look()
        is_written |= is_unseen
    if is_written:
        raise UnsupportedLoopError(WRITES.format(name=name_of(block)))
    return hand_back(zip(own, copies, strict=True), output)


def state_of(block: nn.Module, given: Sequence[Any] = ()) -> OwnState:
    """Of a block, and of what it is `given` besides tensors. Without parameters, and
    what BatchNorm counts, which its output does not need."""
    counted = [
        buffer
        for module in block.modules()
        if has_running_statistics(module)
        for buffer in module.buffers()
    ]
    spares = is_of_library_or_parameters if given else is_of_library
    return OwnState(block, [*block.parameters(), *counted], spares, given)


def is_of_library_or_parameters(attribute: Any) -> bool:
    """As below, and the parameters of models that a block is given."""
    return attribute == PARAMETERS or is_of_library(attribute)


def is_of_library(attribute: Any) -> bool:
    """Whether an attribute of a module is no state of the loop's."""
    is_hooks = str(attribute).endswith("_hooks")
    return is_hooks or attribute == "forward" or is_of_deepspeed(attribute)


@contextlib.contextmanager
def _first(watch: Watch, key: Any, before: OwnState) -> Iterator[None]:
    yield
    watch.note(key, has_changed=before.has_changed())


@contextlib.contextmanager
def _second(
    block: nn.Module,
    given: Sequence[Any],
    before: OwnState,
    rewritten: Sequence[torch.Tensor],
) -> Iterator[None]:
    """`rewritten` are parameters that the first pass has changed: to do so once more
    is to be the same, as to clamp them is."""
    now = state_of(block, given)
    values = [each.detach().clone() for each in rewritten]
    before.set_back()
    try:
        with without_running_statistics(block):
            yield
    finally:
        now.set_back()
        if not all(map(are_close, rewritten, values)):
            raise UnsupportedLoopError(WRITES_OWN.format(name=name_of(block)))


def watch_writes(
    tensors: Iterable[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> Callable[[], tuple[bool, list[nn.Parameter]]]:
    """What tells whether any of the tensors has been written to unseen since, and which
    parameters have."""
    are_written, before = watch_unseen(tensors), numbers_of(parameters)

    def look() -> tuple[bool, list[nn.Parameter]]:
        now = numbers_of(parameters) if before else {}
        changed = {each for each, number in before.items() if now.get(each) != number}
        return are_written(), [each for each in parameters if id(each) in changed]

    disabled: Callable[[], tuple[bool, list[nn.Parameter]]]
    disabled = torch.compiler.disable(look)
    return disabled


def are_close(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Also of one that is freed by now."""
    now = tensor.detach()
    is_freed = now.shape != before.shape or not has_values(now)
    return is_freed or torch.allclose(now, before, rtol=1e-4, atol=1e-6)


def numbers_of(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """A number for each parameter that is here, by its id: of its values."""
    with DisableTorchFunctionSubclass():
        own = {id(each): each.data for each in parameters}
    here = {k: each for k, each in own.items() if is_plain(each) and has_values(each)}
    numbers = fingerprints(here.values()).tolist() if here else []
    return dict(zip(here, numbers, strict=True))
