"""The parameter server's workers: they push gradients and pull parameters."""

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import NoReturn

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import store_of
from labkit.compat.torch import call_step_hooks
from labkit.compat.torch import note_step_taken
from labkit.compat.torch import num_changes
from labkit.records import ModelFacts
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.mesh.channel import Words
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Restore
from labkit.strategies.model.states import Source
from labkit.strategies.model.states import parameters_of
from labkit.strategies.model.states import separate_buffers
from labkit.strategies.optimizers.elementwise import check_elementwise
from labkit.strategies.optimizers.kept import HOOKED
from labkit.strategies.optimizers.kept import IDS
from labkit.strategies.optimizers.kept import check_kept
from labkit.strategies.options import BatchNorm
from labkit.strategies.parameter_server.optimizers import OFFER
from labkit.strategies.parameter_server.optimizers import Entry
from labkit.strategies.parameter_server.optimizers import changes
from labkit.strategies.parameter_server.optimizers import entries_of
from labkit.strategies.parameter_server.optimizers import packed
from labkit.strategies.parameter_server.optimizers import set_settings
from labkit.strategies.parameter_server.optimizers import settings_of
from labkit.strategies.parameter_server.parts import flat
from labkit.strategies.parameter_server.parts import part_of
from labkit.strategies.prepared import Closure
from labkit.strategies.prepared import Norm
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import check_keys

CHANGED_ASYNCHRONOUSLY = (
    "the loop changes parameters outside the optimizer. With --asynchronous the "
    "workers hold different values, so each would make a different change. Leave out "
    "--asynchronous, or that change"
)


OVER = (
    "the servers that step this optimizer ended with their run. Continue in a cell "
    "with %%dist_train parameter_server, which calls prepare again, or make an "
    "optimizer of your own"
)


class Worker(Prepared):
    """A worker has the parameters and computes gradients; the servers, ranks of their
    own, keep the parameters, each its part, and the optimizer with its state.

    Forward and backward: nothing is sent. Step: 1. every worker pushes its gradients
    to the servers; 2. these average them, clip and step; 3. every worker pulls the new
    parameters. Asynchronously each push is a step of its own, at once.

    Buffers are those of the first worker, by way of the first server.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter
    Server", OSDI 2014; asynchronous: Ho et al., "More Effective Distributed ML via a
    Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    def wrap(self) -> None:
        assert self.roles is not None
        check_keys(self.options.config, [], self.strategy.name)
        if self.options.precision == "fp16":
            raise UnsupportedLoopError(
                "--precision fp16 skips the steps in which any gradient overflows, and "
                "a worker knows only its own gradients; use --precision bf16, or ddp"
            )
        # The servers have copies, of which nothing is called.
        check_kept(self.optimizer, self.strategy.name, [IDS, HOOKED])
        self._servers = self.roles.servers
        self.num_shards = len(self._servers)
        if self.num_shards > 1:
            self.note_untried(
                check_elementwise(self.optimizer, self.device, is_by_group=False)
            )
        self._channel = self.roles.channel
        given = parameters_of(self.optimizer)
        self._parameters = list({id(p): p for p in given}.values())
        self._number = -1
        """By which the servers know this model."""
        self._clock = 0
        """Steps that this worker has taken."""
        self._version = 0
        """Steps of the servers that are in the parameters here."""
        self._state_bytes = 0.0
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}
        """As the backward pass left them, with how often each was changed."""
        self._staleness = 0
        """Steps that the servers took between this worker's last pull and the step
        with its gradients."""
        if not self._is_alone:
            separate_buffers(self.module)
        follow(self)
        self._undo.append(partial(unfollow, self))
        self.autocast()
        self._offer()

    @property
    def _is_alone(self) -> bool:
        """Whether this worker's gradients are the whole ones."""
        return self.peers.size == 1

    # ---- to and from the servers ----

    def _tell_all(self, words: Words) -> None:
        for server in self._servers:
            self._channel.tell(server, words)

    def _hear(
        self, tensors: Callable[[int, Words], list[torch.Tensor]] = lambda *_: []
    ) -> list[Words]:
        """The servers' answers, and `tensors(place, answer)` filled by each: a server
        that is not heard to the end lets the others wait."""
        replies = []
        for place, server in enumerate(self._servers):
            reply = self._channel.hear(server)
            self._channel.receive(server, tensors(place, reply))
            replies.append(reply)
        self._channel.flush()
        return replies

    def _push(self, tensors: Sequence[torch.Tensor]) -> None:
        rows = [flat(tensor) for tensor in tensors]
        for place, server in enumerate(self._servers):
            self._channel.send(
                server, [part_of(row, place, self.num_shards) for row in rows]
            )

    def _pull(
        self,
        numbers: Callable[[Words], Sequence[int]],
        others: Callable[[int, Words], list[torch.Tensor]] = lambda *_: [],
    ) -> list[Words]:
        """The servers' answers; their parts of the parameters of these numbers are in
        place, and `others(place, answer)` filled."""
        rows: dict[int, torch.Tensor] = {}

        def parts(place: int, reply: Words) -> list[torch.Tensor]:
            for number in numbers(reply):
                if number not in rows:
                    parameter = self._parameters[number]
                    is_row = parameter.is_contiguous()
                    row = flat(parameter)
                    rows[number] = row if is_row else torch.empty_like(row)
            found = [rows[number] for number in numbers(reply)]
            own = [part_of(row, place, self.num_shards) for row in found]
            return own + others(place, reply)

        replies = self._hear(parts)
        for number, row in rows.items():
            parameter = self._parameters[number]
            if row.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(row.view(parameter.shape))
            torch.autograd.graph.increment_version(parameter)
        self._sums = fingerprints(self._parameters).tolist()
        return replies

    def _offer(self) -> None:
        """Give the servers the model's parameters and the optimizer. Collective."""
        roles, optimizer = self.roles, self.optimizer
        assert roles is not None
        store = store_of(self._channel.group)
        payload = packed(optimizer, self._parameters)
        is_first = self._channel.rank == roles.workers[0]
        roles.num_models += 1
        self._number = roles.num_models
        key = f"{OFFER}/{uuid.uuid4()}"
        if is_first:
            store.set(key, payload)
        shapes = [list(parameter.shape) for parameter in self._parameters]
        dtypes = [str(parameter.dtype) for parameter in self._parameters]
        buffers = [
            [list(buffer.shape), str(buffer.dtype)] for buffer in self._buffers()
        ]
        self._ask("offer", key=key, shapes=shapes, dtypes=dtypes, buffers=buffers)
        if is_first:
            self._push(self._parameters)
        self._pull(lambda reply: range(len(self._parameters)))
        self._settings = settings_of(optimizer)
        has_state = len(optimizer.state) > 0
        state, self._remote = dict(optimizer.state), Remote()
        if has_state:
            self._send_state(state)
        optimizer.state = self._remote  # type: ignore[assignment]

    def _ask(self, kind: str, **words: Any) -> None:
        self._tell_all({"kind": kind, "model": self._number, **words})

    def _buffers(self) -> list[torch.Tensor]:
        """Those that all workers are to have alike."""
        return [] if self._is_alone else list(self.module.buffers())

    # ---- the loop ----

    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        self._check_gradients()

    def end_backward(self, *, has_failed: bool) -> None:
        self._gradients = {
            number: (parameter.grad, num_changes(parameter.grad))
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }

    def _check_gradients(self) -> None:
        """UnsupportedLoopError if the loop has changed what it has only a part of."""
        if self._is_alone:
            return
        for number, (gradient, count) in self._gradients.items():
            now = self._parameters[number].grad
            if now is not None and (now is not gradient or num_changes(now) != count):
                raise UnsupportedLoopError(
                    "the loop changes parameter.grad between the backward pass and the "
                    f"step, and under {self.strategy.name} a worker has the gradient "
                    "of its own samples alone: the servers average them. To clip, give "
                    "--clip NORM; for all else use ddp"
                )

    def check_layout(self) -> None:
        if self.is_over:
            raise UnsupportedLoopError(OVER)

    def step(self, closure: Closure | None = None) -> Norm | None:
        self.check_layout()
        if closure is not None:
            raise UnsupportedLoopError(
                f"{type(self.optimizer).__name__}.step(closure) evaluates the loss "
                "several times per step, and a server cannot; use ddp, or an optimizer "
                "that evaluates it once a step"
            )
        call_step_hooks(self.optimizer, is_before=True)
        self._check_gradients()
        self._check_state()
        given = [n for n, p in enumerate(self._parameters) if p.grad is not None]
        gradients = [self._parameters[number].grad for number in given]
        if any(g.layout != torch.strided for g in gradients if g is not None):
            raise UnsupportedLoopError(
                "a gradient is sparse, like that of an embedding with sparse=True, and "
                f"workers under {self.strategy.name} push dense ones; make it without "
                "sparse=True, or use ddp"
            )
        sums = fingerprints(self._parameters).tolist()
        changed = [n for n, s in enumerate(sums) if s != self._sums[n]]
        own_norm = self._check_own_step(changed)
        now = settings_of(self.optimizer)
        self._clock += 1
        buffers = self._buffers()
        is_first = self.peers.rank == 0
        self._ask(
            "step",
            clock=self._clock,
            batches=self.course.num_batches,
            version=self._version,
            given=given,
            counts=bool(BatchNorm.counts_here),
            changed=changed,
            sums=[sums[number] for number in changed],
            settings=changes(self._settings, now),
            all_settings=now,
        )
        self._push([g for g in gradients if g is not None])
        if is_first:
            if changed:
                self._push([self._parameters[number] for number in changed])
            self._channel.send(self._servers[0], map(flat, buffers))
        norm = self._take_reply(buffers)
        if norm is not None and self.options.clip is not None:
            # As the servers did, for a loop that adds the next ones to them.
            scale = torch.tensor(norm)
            nn.utils.clip_grads_with_norm_(self._parameters, self.options.clip, scale)
        call_step_hooks(self.optimizer, is_before=False)
        self._gradients.clear()  # what the loop now makes of them is its own
        return norm if own_norm is None else own_norm

    def _check_own_step(self, changed: Sequence[int]) -> Norm | None:
        """Of a step that is this worker's alone: the norm, before it is clipped."""
        if not self.options.asynchronous:
            return None
        if changed and not self._is_alone:
            raise UnsupportedLoopError(CHANGED_ASYNCHRONOUSLY)
        if self.options.clip is None:
            return None
        return float(nn.utils.clip_grad_norm_(self._parameters, self.options.clip))

    def _take_reply(self, buffers: list[torch.Tensor]) -> Norm | None:
        rows = [torch.empty_like(flat(each)) for each in buffers]

        def buffers_of_first(place: int, reply: Words) -> list[torch.Tensor]:
            return rows if place == 0 and self.peers.rank > 0 else []

        first = self._pull(lambda reply: reply["updated"], buffers_of_first)[0]
        if self.peers.rank > 0:
            for buffer, row in zip(buffers, rows, strict=True):
                buffer.detach().copy_(row.view(buffer.shape))
        set_settings(self.optimizer, first["settings"])
        self._settings = settings_of(self.optimizer)
        self._version = first["version"]
        self._staleness = first["staleness"]
        self._state_bytes = first["state_bytes"]
        note_step_taken(self.optimizer)
        norm: float | None = first["norm"]
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.clear()
        own = own_values(self.optimizer)
        super().zero_grad(set_to_none)
        for name, value in own_values(self.optimizer).items():
            if name not in own or own[name] != value:
                raise UnsupportedLoopError(
                    f"{type(self.optimizer).__name__}.zero_grad() sets its {name}, and "
                    f"under {self.strategy.name} the optimizer that steps is the "
                    "servers', which does not see it. Have it in param_groups, or use "
                    "ddp"
                )

    # ---- the optimizer's state ----

    def _check_state(self) -> None:
        """What the loop has put in the place of the state goes to the servers."""
        if self.optimizer.state is not self._remote and not self.is_over:
            state = dict(self.optimizer.state)
            self.optimizer.state = self._remote  # type: ignore[assignment]
            self._send_state(state)

    def _send_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Give the servers the state of the optimizer. Collective."""
        by_number = {
            number: state[parameter]
            for number, parameter in enumerate(self._parameters)
            if parameter in state
        }
        entries = entries_of(by_number, self._parameters)
        self._ask("load", entries=[each.words() for each in entries])
        if self.peers.rank == 0:
            for place, server in enumerate(self._servers):
                rows = [
                    part_of(flat(each.tensor), place, self.num_shards)
                    if each.is_divided
                    else flat(each.tensor)
                    for each in entries
                    if each.tensor is not None
                ]
                self._channel.send(server, rows)
        self._hear()

    def _fetch(self, *, with_state: bool) -> dict[int, dict[str, Any]]:
        """The parameters as all workers are to have them, and on those that want it the
        state. Collective."""
        self._check_state()
        self._ask("fetch", state=with_state, clock=self._clock)
        found: dict[int, dict[str, Any]] = {}
        tensors: dict[tuple[int, str], torch.Tensor] = {}

        def state(place: int, reply: Words) -> list[torch.Tensor]:
            return self._places(place, reply, found, tensors)

        # What the loop has set since the last step is what it wants to have.
        is_theirs = fingerprints(self._parameters).tolist() == self._sums
        if self.options.asynchronous and is_theirs:
            replies = self._pull(lambda reply: range(len(self._parameters)), state)
            self._version = replies[0]["version"]
        elif self.options.asynchronous:

            def unused(place: int, reply: Words) -> list[torch.Tensor]:
                rows = [torch.empty_like(flat(each)) for each in self._parameters]
                own = [part_of(row, place, self.num_shards) for row in rows]
                return own + state(place, reply)

            replies = self._hear(unused)
        else:
            replies = self._hear(state)
        if with_state and (why := replies[0]["why"]):
            raise UnsupportedLoopError(why)
        return found

    def _places(
        self,
        place: int,
        reply: Words,
        found: dict[int, dict[str, Any]],
        tensors: dict[tuple[int, str], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Where a server's part of the state is to be; numbers are at once."""
        rows = []
        for words in reply["entries"]:
            entry = Entry(*words)
            state = found.setdefault(entry.number, {})
            if entry.shape is None:
                state[entry.key] = entry.plain_value()
                continue
            key = entry.number, entry.key
            if key not in tensors:
                whole = self._parameters[entry.number]
                shape = whole.shape if entry.is_divided else entry.shape
                tensors[key] = torch.empty(
                    shape, dtype=entry.torch_dtype, device=self.device
                )
                state[entry.key] = tensors[key]
            row = flat(tensors[key])
            is_part = entry.is_divided
            rows.append(part_of(row, place, self.num_shards) if is_part else row)
        return rows

    @contextlib.contextmanager
    def _with_state(self, *, is_wanted: bool) -> Iterator[None]:
        """Within it the optimizer has its state, on ranks that want it. Collective."""
        if self.is_over:
            yield
            return
        state = self._own_state(self._fetch(with_state=is_wanted))
        self.optimizer.state = state
        try:
            yield
        finally:
            if self.optimizer.state is state:
                self.optimizer.state = self._remote  # type: ignore[assignment]
            else:  # another was loaded
                self._check_state()

    def stepping_groups(self) -> contextlib.AbstractContextManager[None]:
        return self._with_state(is_wanted=True)

    def _own_state(self, found: Mapping[int, dict[str, Any]]) -> Any:
        state: Any = defaultdict(dict)
        for number, values in found.items():
            state[self._parameters[number]] = values
        return state

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        # One worker writes the state: they all would have the same.
        is_first = self.peers.rank == 0
        with self._with_state(is_wanted=with_optimizer and is_first):
            return super().checkpoint(with_optimizer=with_optimizer)

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        if not with_optimizer or self.is_over:
            return super().restoring(source, values, with_optimizer=with_optimizer)
        self.optimizer.state = defaultdict(dict)
        try:
            restore = super().restoring(source, values)
        finally:
            self.optimizer.state = self._remote  # type: ignore[assignment]

        def restore_all() -> None:
            self.optimizer.state = defaultdict(dict)
            restore()
            self._check_state()

        return restore_all

    # ---- what is asked of it ----

    def metrics(self) -> dict[str, float]:
        return {"staleness": self._staleness} if self.options.asynchronous else {}

    def memory(self) -> dict[str, Tensors]:
        """A worker has no optimizer state."""
        return {
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "gradients": [parameter.grad for parameter in self.module.parameters()],
            "optimizer_state": [],
        }

    def facts(self) -> ModelFacts:
        """The optimizer's state is that of a server."""
        return ModelFacts(
            self._num_parameters,
            self.num_trainable(),
            self._state_bytes,
            self.num_shards,
        )

    def replicas(self) -> dict[str, torch.Tensor]:
        if self.options.asynchronous:
            return {}
        return self.counted() | dict(self.module.named_parameters())

    def finish(self) -> None:
        """Take what the servers have, before they are dismissed: afterwards the
        optimizer is a plain one. Collective."""
        with contextlib.suppress(UnsupportedLoopError):  # of a state of its own kind
            found = self._fetch(with_state=True)
            self.optimizer.state = self._own_state(found)


class Remote(dict[Any, Any]):
    """Stands for an optimizer's state that the servers have."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedLoopError(
            "the optimizer's state is on the servers while a run has them, and this "
            "rank has none of it; call save_checkpoint and load_checkpoint for all of "
            "it, or use ddp"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse
    __contains__ = get = items = keys = values = clear = update = _refuse
    pop = popitem = setdefault = _refuse


def own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer with a zero_grad of its own keeps besides groups and state."""
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
        return {}
    values = vars(optimizer).items()
    return {name: value for name, value in values if isinstance(value, int | float)}
