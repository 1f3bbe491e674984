"""Data parallelism: a replica on every rank, gradients averaged over the ranks."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from labkit.checks import UnsupportedLoopError
from labkit.compat.data_parallel import begin_reduction
from labkit.compat.data_parallel import broadcast_buffers
from labkit.compat.torch import buffers_of
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys


class DDP(Prepared):
    """Replicate the model from rank 0 and average its gradients in every backward.

    Forward: identity. Backward: all-reduce of the gradients, in buckets, while the
    rest of the backward pass still runs; only in a step's last microbatch.

    The reducer is DistributedDataParallel's own. It is prepared for a backward pass
    when that begins, and not in `forward`, so that a step may have several of either.

    `--config` takes the arguments of DistributedDataParallel.

    Source: Li et al., "PyTorch Distributed", VLDB 2020;
    `torch.nn.parallel.DistributedDataParallel`.
    """

    def wrap(self) -> None:
        names = list(inspect.signature(DistributedDataParallel).parameters)
        check_keys(self.options.config, names[1:], "DistributedDataParallel")
        if self.options.config.get("static_graph") and self.options.accumulate > 1:
            # Its first iteration must all-reduce, and a step's first microbatch does
            # not: torch would end in an internal assertion.
            raise ValueError(
                '--config: "static_graph" does not work with --accumulate '
                f"{self.options.accumulate}: only the last microbatch of a step has an "
                "all-reduce; leave out one of the two"
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(
                "ddp has nothing to do: no parameter requires a gradient; call "
                "requires_grad_(True) on those to train, before prepare"
            )
        self._settings: dict[str, Any] = dict(self.options.config)
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._make_reducer()
        # Not the method itself, which a copy of the model would copy, with us.
        vars(self.module)["register_comm_hook"] = lambda state, hook: (
            self._register_comm_hook(state, hook)
        )
        self._has_agreed = False
        follow(self)
        self.autocast()

    def _make_reducer(self) -> None:
        """For the parameters that require gradients now. Collective."""
        settings = {"process_group": self.peers.group, **self._settings}
        self._ddp = apply_ddp(self.module, **settings)
        # Later ones are made within a backward pass, which has saved the parameters.
        self._settings["init_sync"] = False
        self._has_failed = False
        for state, hook in self._comm_hooks:
            self._ddp.register_comm_hook(state, hook)
        self._reduced = {id(p) for p in self.given_parameters if p.requires_grad}

    def _register_comm_hook(self, state: Any, hook: Any) -> None:
        """`DistributedDataParallel.register_comm_hook`, which the model has in a "
        "run."""
        self._ddp.register_comm_hook(state, hook)
        self._comm_hooks.append((state, hook))

    def close(self) -> None:
        super().close()
        vars(self.module).pop("register_comm_hook", None)

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        if not self.is_last:
            return
        trained = {id(parameter) for parameter, _ in self._accumulators}
        if trained != self._reduced or self._has_failed:
            self._make_reducer()  # the loop has frozen some, or unfrozen
        if not self._has_agreed:
            self._agree_on_unused(len(used) < len(self._reduced))
        ddp: Any = self._ddp
        begin_reduction(ddp)
        if ddp.find_unused_parameters and not ddp.static_graph:
            ddp.reducer.prepare_for_backward([r for r in roots if is_tensor(r)])
            return
        if len(used) < len(self._reduced) and not ddp.static_graph:
            ours = {id(parameter) for parameter in used}
            name = next(
                name
                for name, p in self.module.named_parameters()
                if id(p) in self._reduced and id(p) not in ours
            )
            raise UnsupportedLoopError(
                f"{name} gets no gradient in this backward pass but did in the first "
                "one, so ddp would wait for it on every rank. Define options = "
                '{"find_unused_parameters": True} in a notebook cell and add '
                "--config options to the magic line"
            )
        ddp.reducer.prepare_for_backward([])

    def end_backward(self, *, has_failed: bool) -> None:
        self._has_failed = has_failed  # which its reducer would wait for the end of
        if self._ddp.gradient_as_bucket_view and self.is_last:
            # The reducer's own views of its buckets must stay what they are, also where
            # a loop sets `parameter.grad.data`.
            for parameter, _ in self._accumulators:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach()

    def _agree_on_unused(self, has_unused: bool) -> None:
        """Look for unused parameters in every pass if the first one has any, on any
        rank: to look is a search of the graph, and one more all-reduce."""
        self._has_agreed = True
        if "find_unused_parameters" in self._settings or self._ddp.static_graph:
            return
        if self.peers.greatest([has_unused]) == [1]:
            self._settings["find_unused_parameters"] = True
            self._make_reducer()

    def step(self, closure: Closure | None = None) -> Norm | None:
        norm = super().step(closure)
        if self._ddp.will_sync_module_buffers():
            # Of BatchNorm: here, for a forward pass may be one rank's alone.
            broadcast_buffers(self._ddp)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.options.accumulate > 1 and self._ddp.gradient_as_bucket_view:
            # Or the next microbatch would make gradients outside of the buckets.
            set_to_none = False
        super().zero_grad(set_to_none)

    def memory(self) -> dict[str, Tensors]:
        held = super().memory()
        if not self._ddp.gradient_as_bucket_view:
            # The reducer's buckets are out of reach, and as large as the gradients.
            held["communication_buffers"] = [
                p.nbytes for p in self.module.parameters() if p.requires_grad
            ]
        return held

    def release(self) -> None:
        unfollow(self)
        del self._ddp

    def replicas(self) -> dict[str, torch.Tensor]:
        return self.counted() | dict(self.module.named_parameters())


def apply_ddp(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    gradient_as_bucket_view: bool = True,
    **settings: Any,
) -> DistributedDataParallel:
    """`model`, which has the values of its first rank, with gradients averaged along
    the one axis of `mesh`; over all ranks without it. Collective.

    Gradients live in the buckets: one copy less of them in memory. `settings` are
    arguments of `DistributedDataParallel`.
    """
    if mesh is not None:
        settings["process_group"] = mesh.get_group()
    for module in model.modules():
        for name, buffer in buffers_of(module).items():
            # It broadcasts them, which one of several elements in a place bars.
            if buffer is not None and 0 in buffer.stride():
                buffers_of(module)[name] = buffer.contiguous()
    return DistributedDataParallel(
        model, gradient_as_bucket_view=gradient_as_bucket_view, **settings
    )


def is_tensor(root: Any) -> bool:
    return isinstance(root, torch.Tensor)
