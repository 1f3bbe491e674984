"""Data parallelism: a replica on every rank, gradients averaged over the ranks."""

import inspect
import weakref
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from labkit.checks import UnsupportedLoopError
from labkit.checks import is_int
from labkit.checks import short_repr
from labkit.compat.data_parallel import begin_reduction
from labkit.compat.data_parallel import broadcast_buffers
from labkit.compat.data_parallel import buckets_of
from labkit.compat.torch import no_dispatch
from labkit.records import Averages
from labkit.records import Bucket
from labkit.records import ModelFacts
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.communication import HOOKS
from labkit.strategies.communication.averaging import Averaging
from labkit.strategies.communication.hook import Hook
from labkit.strategies.communication.saved import restoring_state
from labkit.strategies.communication.saved import saved_state
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.strategies.model.states import separate_buffers
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys

EVALUATED_ALONE = (
    "--average-every: the loop evaluates the model between two averages, where each "
    "rank has its own parameters, unlike one process. Evaluate on "
    "loader.share(dataset, batch_size=B), before which parameters are averaged, or "
    "after a multiple of K steps"
)
STATES_DIFFER = (
    "--average-every: ranks have kept optimizer states of other parameters, or of "
    "other shapes, so these are not averaged at the end, unlike in one process"
)


class DDP(Prepared):
    """Replicate the model from rank 0 and average its gradients in every backward.

    Forward: identity. Backward: all-reduce of the gradients, in buckets, while the
    rest of the backward pass still runs; only in a step's last microbatch.

    The reducer is DistributedDataParallel's own. It is prepared for a backward pass
    when that begins, and not in `forward`, so that a step may have several of either.

    With `--comm` the gradients are sent in fewer bytes, by a communication hook; with
    `--average-every` it is the parameters that are averaged, and seldom.

    `--config` takes the arguments of DistributedDataParallel, and those of the hook.

    Source: Li et al., "PyTorch Distributed", VLDB 2020;
    `torch.nn.parallel.DistributedDataParallel`.
    """

    def wrap(self) -> None:
        self._hook = self._make_hook()
        self._averaging = self._make_averaging()
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
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._ddp: Any
        """The DistributedDataParallel; None where every rank steps alone."""
        self._buckets: list[weakref.ref[torch.UntypedStorage]] = []
        self._make_reducer()
        self._drop_reducer_if_alone()
        # Not the method itself, which a copy of the model would copy, with us.
        vars(self.module)["register_comm_hook"] = lambda state, hook: (
            self._register_comm_hook(state, hook)
        )
        self._has_agreed = self._has_noted = False
        self._zeroed: set[int] | None = None
        """Once the loop has cleared gradients, ids of parameters whose gradient is 0 in
        place of None, until it comes."""
        self._has_summed = False
        """Whether a pass has reduced gradients."""
        self._given: list[tuple[nn.Parameter, weakref.ref[torch.Tensor]]] = []
        """Gradients of parameters, as passes have left them in the buckets."""
        self._going_on: dict[int, torch.Tensor] = {}
        """By id of their parameters, those that this pass adds to."""
        self._begun: Any = None
        """The reducer of the last backward pass."""
        follow(self)
        self.autocast()

    def _make_hook(self) -> Hook | None:
        """What sends the gradients, where it is not DDP itself. ValueError for settings
        and models that it does not take."""
        method, config = self.options.comm, self.options.config
        names = list(inspect.signature(DistributedDataParallel).parameters)[1:]
        self._settings: dict[str, Any] = {n: config[n] for n in names if n in config}
        if method is None:
            check_keys(config, names, "DistributedDataParallel")
            return None
        hook = HOOKS[method](method, self.peers, config)
        taker = f"--comm {method} with DistributedDataParallel"
        check_keys(config, [*names, *hook.takes], taker)
        hook.check(self.module)
        if hook.residuals is not None:
            hook.residuals.follow(self.module)
        return hook

    def _make_averaging(self) -> Averaging | None:
        every = self.options.average_every
        if every is None:
            return None
        averaging = Averaging(
            self.module,
            self.optimizer,
            self.peers,
            every=every,
            after=self.options.average_after or 0,
        )

        def note_use(module: nn.Module, args: Any) -> None:
            if averaging.num_alone and not (
                module.training and torch.is_grad_enabled()
            ):
                self.note(EVALUATED_ALONE)

        self._undo.append(self.module.register_forward_pre_hook(note_use).remove)
        if self.options.average_after:
            self.steps_to_measure = [self.options.average_after + 1]
        return averaging

    @property
    def _is_local(self) -> bool:
        """Whether this step is each rank's own."""
        return self._averaging is not None and self._averaging.is_local

    @property
    def acts_alone(self) -> bool:
        return self._is_local

    def _drop_reducer_if_alone(self) -> None:
        if self._is_local:
            self._ddp = None

    def _make_reducer(self) -> None:
        """For the parameters that require gradients now. Collective."""
        settings = {"process_group": self.peers.group, **self._settings}
        self._ddp = apply_ddp(self.module, **settings)
        # Later ones are made within a backward pass, which has saved the parameters.
        self._settings["init_sync"] = False
        self._has_failed = False
        if self._hook is not None:
            self._ddp.register_comm_hook(None, self._hook.send)
        for state, hook in self._comm_hooks:
            self._ddp.register_comm_hook(state, hook)
        self._reduced = self.accumulators()  # those that it has, with their nodes

    def _register_comm_hook(self, state: Any, hook: Any) -> None:
        """`DistributedDataParallel.register_comm_hook`, of the model in a run."""
        if self._averaging is not None:
            raise UnsupportedLoopError(
                "the loop registers a communication hook for gradients, and with "
                "--average-every parameters are sent in their place. Leave out "
                "--average-every, or the hook"
            )
        if self._hook is not None:
            raise UnsupportedLoopError(
                "the loop registers a communication hook, and --comm "
                f"{self._hook.method} is one: DDP has one for all gradients. Leave out "
                "--comm, or the hook"
            )
        self._ddp.register_comm_hook(state, hook)
        self._comm_hooks.append((state, hook))

    def close(self) -> None:
        super().close()
        vars(self.module).pop("register_comm_hook", None)

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        if self._averaging is not None and not self._has_noted:
            self._has_noted = True
            self.note(self._averaging.note)
        before = self._ddp
        if self._has_failed:
            self._make_reducer()  # or it would take these gradients, too, for its own
        if self._zeroed is not None:
            self._zeroed.difference_update(map(id, used))
        if not self.is_last or self._is_local:
            return
        if self._ddp is None or self._accumulators is not self._reduced:
            # The loop has frozen some, or moved them; or gone back to an earlier step.
            self._make_reducer()
        if not self._has_agreed:
            self._agree_on_unused(len(used) < len(self._reduced))
        ddp: Any = self._ddp
        is_new = ddp is not before or not self._has_summed
        if is_new and self.options.accumulate > 1:
            self._fill_gradients(used)
        self._leave_kept()
        begin_reduction(ddp)
        if self._hook is not None:
            self._begin_residuals(used)
            self._hook.begin(is_new=ddp.reducer is not self._begun)
            self._begun = ddp.reducer
            if not self._has_noted:
                self._has_noted = True
                self.steps_to_measure = self._hook.steps_to_measure()
                self.note(self._hook.note)
        if ddp.find_unused_parameters and not ddp.static_graph:
            ddp.reducer.prepare_for_backward([r for r in roots if torch.is_tensor(r)])
            return
        if len(used) < len(self._reduced) and not ddp.static_graph:
            unused = {id(p) for p, _ in self._reduced} - {id(p) for p in used}
            named = self.module.named_parameters()
            names = (name for name, p in named if id(p) in unused)
            name = next(names, "a parameter that the model no longer has")
            raise UnsupportedLoopError(
                f"{name} gets no gradient in this backward pass but did in the first "
                "one, so ddp would wait for it on every rank. Define options = "
                '{"find_unused_parameters": True} in a notebook cell and add '
                "--config options to the magic line"
            )
        ddp.reducer.prepare_for_backward([])

    def _fill_gradients(self, used: Sequence[nn.Parameter]) -> None:
        """Have a gradient of 0 where there is none yet, as a reducer that has not seen
        the step's earlier microbatches takes what only those of other ranks have used
        for unused: it leaves the gradient as it is on each rank."""
        self._has_summed = True
        self._zeroed = self._zeroed or set()  # on every rank: to drop is collective
        ours = {id(parameter) for parameter in used}
        for parameter, _ in self._reduced:
            if parameter.grad is None and id(parameter) not in ours:
                parameter.grad = torch.zeros_like(parameter)
                self._zeroed.add(id(parameter))

    def _begin_residuals(self, used: Sequence[nn.Parameter]) -> None:
        assert self._hook is not None
        if self._hook.residuals is None:
            return
        unused: list[int] = []
        if self._ddp.find_unused_parameters:
            trained = [parameter for parameter, _ in self._accumulators]
            ours = {id(parameter) for parameter in used}
            some = self.peers.greatest([id(each) in ours for each in trained])
            pairs = zip(trained, some, strict=True)
            unused = [id(each) for each, is_used in pairs if not is_used]
        one = torch.ones((), device=self.device)
        scale = None if self.scaler is None else self.scaler.scale(one)
        self._hook.residuals.begin(frozenset(unused), scale)

    def end_backward(self, *, has_failed: bool) -> None:
        if self._ddp is None or not self.is_last:
            return
        if self._hook is not None:
            self._hook.end(has_failed=has_failed or self._has_overflown())
        self._has_failed = has_failed  # which its reducer would wait for the end of
        if self._zeroed is not None and not has_failed:
            self._drop_zeroed(self._zeroed)
            self._zeroed = None
        if self._ddp.gradient_as_bucket_view:
            # The reducer's own views of its buckets must stay what they are, also where
            # a loop sets `parameter.grad.data`.
            for parameter, _ in self._accumulators:
                if (gradient := parameter.grad) is None:
                    continue
                given = self._going_on.get(id(parameter))
                if given is None:
                    given = gradient.detach()
                    self._given.append((parameter, weakref.ref(given)))
                elif given is not gradient:  # it is in another bucket now
                    given.data = gradient
                parameter.grad = given
            self._going_on.clear()

    def _leave_kept(self) -> None:
        """Have gradients that were kept from a step before, by the loop or by the
        optimizer, in memory of their own: the next ones come to the buckets."""
        given, self._given = self._given, []
        self._going_on.clear()
        for parameter, reference in given:
            gradient = reference()
            if gradient is None:
                continue
            if gradient is parameter.grad:
                self._given.append((parameter, reference))
                self._going_on[id(parameter)] = gradient
            else:
                gradient.data = gradient.detach().clone()

    def _drop_zeroed(self, zeroed: set[int]) -> None:
        """Have no gradient of 0 where none has come on any rank: an optimizer leaves
        alone a parameter without one. Collective."""
        trained = [parameter for parameter, _ in self._reduced]
        if self._ddp.find_unused_parameters:
            some = self.peers.greatest([id(p) not in zeroed for p in trained])
            zeroed -= {id(p) for p, has in zip(trained, some, strict=True) if has}
        for parameter in self.module.parameters():
            if id(parameter) in zeroed:
                parameter.grad = None

    def _has_overflown(self) -> bool:
        """Whether the scaler will skip the step, on all ranks: what was sent is lost.
        It waits for a GPU, as the scaler does next."""
        if self.scaler is None:
            return False
        found = [p.grad for p, _ in self._accumulators if p.grad is not None]
        return not torch.stack([each.isfinite().all() for each in found]).all()

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
        if closure is not None and self._is_local:
            kind = type(self.optimizer).__name__
            raise UnsupportedLoopError(
                f"{kind}.step(closure) evaluates the loss several times, each time on "
                "all ranks together, and with --average-every they step alone; leave "
                "out --average-every, or use an optimizer that evaluates it once"
            )
        was_local = self._is_local
        norm = super().step(closure)
        if self._averaging is not None:
            self._averaging.step()
        if was_local:
            return norm
        self._note_buckets()
        self._share_buffers()
        if self._averaging is not None:
            self._drop_reducer_if_alone()
        return norm

    def begin_own_step(self, kind: str) -> None:
        options = self.options
        is_plain = options.accumulate == 1 and options.clip is None
        if not is_plain or self.scaler is not None or self._averaging is not None:
            super().begin_own_step(kind)
        self.course.step()
        self._share_buffers()

    def _share_buffers(self) -> None:
        """As of BatchNorm: with a step, for a forward pass may be one rank's alone."""
        if self._ddp.will_sync_module_buffers():
            broadcast_buffers(self._ddp)

    @property
    def is_one_model(self) -> bool:
        return self._averaging is None or not self._averaging.num_alone

    def unite(self, *, with_optimizer: bool = False) -> None:
        if self._averaging is None:
            return
        self._averaging.average()
        if with_optimizer and not self._averaging.average_state():
            self.note(STATES_DIFFER)

    def averages(self) -> Averages | None:
        return None if self._averaging is None else self._averaging.sent()

    def zero_grad(self, set_to_none: bool = True) -> None:
        has_views = self._ddp is not None and self._ddp.gradient_as_bucket_view
        if has_views and self._has_failed:
            # What was on its way then may yet arrive in them.
            set_to_none = True
        elif has_views and self.options.accumulate > 1:
            # Or the next microbatch would make gradients outside of the buckets.
            if set_to_none:
                groups = self.optimizer.param_groups
                self._zeroed = {id(p) for group in groups for p in group["params"]}
                for parameter, _ in self._accumulators:
                    if parameter.grad is not None:  # who has kept it keeps it
                        parameter.grad = parameter.grad.detach()
                self._leave_kept()
            set_to_none = False
        super().zero_grad(set_to_none)

    def _note_buckets(self) -> None:
        """Where the gradients are views of DDP's buckets, which stay when the loop sets
        gradients to None, and are out of reach then."""
        if self._ddp is None or not self._ddp.gradient_as_bucket_view:
            return
        # A sparse one, as of an embedding, is in no bucket, and has no storage.
        storages = (
            parameter.grad.untyped_storage()
            for parameter, _ in self._reduced
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        )
        first = next(storages, None)  # in every step; the others where it is new
        if first is None:
            return
        for bucket in self._buckets:
            if bucket() is first:
                return
        found = {id(each): each for each in (first, *storages)}
        self._buckets = [weakref.ref(each) for each in found.values()]

    def memory(self) -> dict[str, Tensors]:
        found = super().memory()
        with no_dispatch():
            kept = [
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
                for bucket in self._buckets
                if (storage := bucket()) is not None
            ]
        return {**found, "gradients": [*found["gradients"], *kept]}

    def communication_buffers(self) -> Tensors:
        if self._ddp is not None and not self._ddp.gradient_as_bucket_view:
            # The reducer's buckets are out of reach, and as large as the gradients.
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    yield parameter.nbytes
        if self._hook is not None:
            yield from self._hook.tensors()

    def facts(self) -> ModelFacts:
        if self._ddp is None:
            return super().facts()
        reduced = {id(parameter) for parameter, _ in self._reduced}
        trained = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if id(parameter) in reduced  # they may be frozen at the moment
        }
        names, tensors = list(trained), list(trained.values())
        buckets = [
            Bucket([names[n] for n in places], [tensors[n].nbytes for n in places])
            for places in buckets_of(self._ddp, tensors)
        ]
        facts = replace(super().facts(), buckets=buckets)
        if self._hook is None or not self._hook.settings:
            return facts
        matrices = [list(shape_of_matrix(tensor)) for tensor in tensors]
        return replace(facts, matrices=matrices, comm=self._hook.settings)

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        self.unite(with_optimizer=with_optimizer)
        tensors, values = super().checkpoint(with_optimizer=with_optimizer)
        if self._averaging is not None and with_optimizer:
            values["num_steps"] = self._averaging.num_steps
        if self._hook is not None and with_optimizer:
            unsent, values["comm"] = saved_state(self._hook)
            tensors |= unsent
        return tensors, values

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        restore = super().restoring(source, values, with_optimizer=with_optimizer)
        if not with_optimizer:
            return restore
        num_steps = values.get("num_steps", 0)
        if not is_int(num_steps):
            raise ValueError(
                f"the checkpoint is damaged: num_steps is {short_repr(num_steps)}, not "
                "a whole number; load another checkpoint"
            )
        restore_hook: Restore = lambda: None  # noqa: E731
        if values.get("comm"):
            restore_hook = restoring_state(
                self._hook, source, values["comm"], self.note
            )

        def restore_all() -> None:
            restore()
            restore_hook()
            if self._averaging is not None:
                self._averaging.resume(num_steps)
                self._drop_reducer_if_alone()

        return restore_all

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
    separate_buffers(model)  # it broadcasts them
    return DistributedDataParallel(
        model, gradient_as_bucket_view=gradient_as_bucket_view, **settings
    )


def shape_of_matrix(parameter: torch.Tensor) -> tuple[int, int]:
    """Its first dimension, and all the others together."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // max(1, rows)
