"""Compares a split model with the whole one, before the first step.

A plan can be wrong without an error: columns of a layer whose output is cut in three
afterwards, a parameter between two split layers that has a part of its gradient on each
rank. What is found is refused while nothing has been trained.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.c10d import ranks_of
from labkit.compat.torch import buffers_of
from labkit.compat.torch import tree_leaves
from labkit.compat.torch import without_modes
from labkit.strategies.autograd.trial import WithoutGradients
from labkit.strategies.mesh.collectives import NoCollectiveCalls
from labkit.strategies.model.alike import check_inputs
from labkit.strategies.model.materialize import empty_copy
from labkit.strategies.own_state import unchanged
from labkit.strategies.prepared import blocks

TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.05}
"""Of the largest difference of outputs, relative to the largest output."""


FAILS = (
    "split by this plan the model fails, and the whole one does not: {what}. A layer "
    "that is split by columns gives each rank a part of its output, and one that is "
    "split by rows takes such a part. Let view infer the number of heads, as in "
    "x.view(B, T, -1, head_dim), or leave these layers out of the plan"
)


ITERATES = (
    "it, or a function that it calls, has an iterator, of which a trial would use up "
    "values"
)
COLLECTIVE = (
    "the model's forward calls a collective of torch.distributed, and under tensor the "
    "ranks that share its layers have the same samples: what it gathers or sums has "
    "each of them several times. Leave the collective out of forward under tensor, or "
    "use ddp"
)


class Comparison:
    """Runs the first input of a model through its whole copy as well.

    The copy has no values of its own: each block gets its parameters, gathered, when it
    is to run, and gives them back; a layer may be read without being called. Nothing of
    the model is changed by it.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` is the whole one, which is about to be split."""
        self._copy: nn.Module | None = empty_copy(model)
        self.has_run = False
        self.hindrance = ""
        """Why it could not compare, in words."""
        self.in_parts: list[str] = []
        """The modules that were found to return a part of what they do in the whole
        model."""

    def attach(self, model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
        """It is `model` that is to be compared, split along the one axis of `mesh`."""
        self._model, self._mesh = model, mesh
        self._tolerance = TOLERANCE[precision]
        self._parameters: dict[str, Any] = dict(model.named_parameters())

    @torch.compiler.disable  # of a model that the loop has compiled, it is no part
    def run_once(self, args: Any, kwargs: Any) -> None:
        """Compare what the model computes of these arguments, the first time only. A
        failure is not tried again. Collective."""
        if self._copy is None:
            return
        model, copy, self._copy = self._model, self._copy, None
        self.has_run = True
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(without_modes())  # it is no part of the loop
            contexts.enter_context(torch.inference_mode(False))
            contexts.enter_context(WithoutGradients())
            contexts.enter_context(without_fast_path())
            check_inputs(tree_leaves((args, kwargs)), self._mesh)
            contexts.enter_context(evaluating(model))
            with unchanged(model) as state:
                if state.has_iterators:
                    self.hindrance = ITERATES
                    return
                found, ours, error = self._outputs(model, args, kwargs)
            # Both from the same state: forward may change it.
            contexts.enter_context(unchanged(model))
            contexts.enter_context(self._gathering(copy))
            others = set(ranks_of(self._mesh.get_group())) - {dist.get_rank()}
            contexts.enter_context(NoCollectiveCalls(others, COLLECTIVE))
            expected, theirs, own = self._outputs(copy, args, kwargs)
            if error is not None and own is None:
                raise UnsupportedLoopError(
                    FAILS.format(what=f"{type(error).__name__}: {error}")
                ) from error
            if own is not None:  # the whole model's, if the other fails as well
                self.hindrance = f"a copy of it fails: {type(own).__name__}: {own}"
                return
            self._check_outputs(tree_leaves(found), tree_leaves(expected))
        self.in_parts = [name for name in ours if ours[name] != theirs.get(name)]

    def _outputs(
        self, model: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, list[Any]], Exception | None]:
        """What a model gives, the shapes of what its modules do, and its error."""
        found, error = None, None
        with fork_rng(self._mesh), shapes_of_outputs(model) as shapes:
            try:
                found = model(*args, **kwargs)
            except UnsupportedLoopError:
                raise
            except Exception as failure:  # whatever a model may raise
                error = failure
        return found, shapes, error

    @contextlib.contextmanager
    def _gathering(self, copy: nn.Module) -> Iterator[None]:
        """Within it a block of the copy has its parameters while it runs, and the copy
        those that are in none."""
        parts = {module: each for each in blocks(copy) for module in each.modules()}
        owners: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
        for prefix, module in copy.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                whole = f"{prefix}.{name}".lstrip(".")
                part = parts.get(module, copy)
                owners.setdefault(part, []).append((module, name, whole))
        plain = dict(self._model.named_modules())
        aliases = {
            name: first
            for names in tied_names(copy)
            for name in names
            if (first := next(n for n in names if n in self._parameters))
        }
        for prefix, module in copy.named_modules():
            for name in buffers_of(module):
                # A layer that is split has DTensors, each whole on every rank.
                buffers_of(module)[name] = local_part(buffers_of(plain[prefix])[name])

        def gather(part: nn.Module, args: Any) -> None:
            for module, name, whole in owners[part]:
                value = self._parameters[aliases.get(whole, whole)].detach()
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                # Not `register_parameter`: an RNN has a list of them as well.
                setattr(module, name, nn.Parameter(value, False))

        def give_back(part: nn.Module, args: Any, output: Any) -> None:
            for module, name, _ in owners[part]:
                empty = getattr(module, name).to("meta")
                setattr(module, name, nn.Parameter(empty, False))

        for part in owners:
            part.register_forward_pre_hook(gather)
            part.register_forward_hook(give_back)
        copy.eval()
        yield

    def _difference(self, ours: torch.Tensor, theirs: torch.Tensor) -> str:
        """How outputs differ, in words; "" where they do not."""
        if ours.shape != theirs.shape:
            return f"have shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        if not theirs.numel():
            return ""
        found = float((ours - theirs).abs().max() / theirs.abs().max())
        is_other = found > max(self._tolerance, tolerance_of_autocast(self._mesh))
        return f"differ by {found:.1%} of the largest" if is_other else ""

    def _check_outputs(self, found: list[Any], expected: list[Any]) -> None:
        pairs = [
            (ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs)
            for ours, theirs in zip(found, expected, strict=True)
            if isinstance(theirs, torch.Tensor) and theirs.is_floating_point()
        ]
        for ours, theirs in pairs:
            if what := self._difference(ours, theirs):
                raise UnsupportedLoopError(
                    f"split by this plan the model computes something else: its "
                    f"outputs {what}. A layer whose output is cut or mixed afterwards, "
                    "like one for queries, keys and values together, cannot be split "
                    "by columns: make it several, or leave it out of the plan"
                )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` is in eval mode within it."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Attention and encoder layers of torch read, in eval mode, the weights of layers
    that they do not call."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def tolerance_of_autocast(mesh: DeviceMesh) -> float:
    """That of the precision in which a loop's own torch.autocast computes, if any."""
    if not torch.is_autocast_enabled(mesh.device_type):
        return 0.0
    is_fp16 = torch.get_autocast_dtype(mesh.device_type) == torch.float16
    return TOLERANCE["fp16" if is_fp16 else "bf16"]


def fork_rng(mesh: DeviceMesh) -> contextlib.AbstractContextManager[None]:
    """Within it random numbers are drawn that come again after it."""
    kind = mesh.device_type
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    return torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind)


@contextlib.contextmanager
def shapes_of_outputs(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """By name, the shapes of what the modules of `model` return within it."""
    found: dict[str, list[Any]] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        found.setdefault(name, []).extend(t.shape for t in tensors)

    hooks = [
        module.register_forward_hook(partial(note, name))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def check_gradients(parameters: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """UnsupportedLoopError where a parameter that every rank has whole got another
    gradient on each: a part of it. Collective."""
    there = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    if not there:
        return
    sums = [local_part(each).double() for each in there.values()]
    found = torch.stack([each.sum() for each in sums])
    scale = torch.stack([each.abs().sum() for each in sums])
    both = torch.stack([found, -found]).nan_to_num()
    dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
    for name, spread, size in zip(there, both.sum(0), scale, strict=True):
        if spread > 1e-3 * size + 1e-12:
            raise UnsupportedLoopError(
                f"{name} is whole on every rank, and its gradient differs between "
                "ranks: it lies between two layers that are split, and each rank has "
                "the gradient of its part. Leave these layers out of the plan"
            )


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]
