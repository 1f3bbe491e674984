"""The parameter server's servers: they keep the parameters and take the steps."""

import math
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import store_of
from labkit.records import ModelFacts
from labkit.strategies.autograd.agreement import OTHER_SETTINGS
from labkit.strategies.autograd.agreement import SKIPPED
from labkit.strategies.mesh.channel import Channel
from labkit.strategies.mesh.channel import Inbox
from labkit.strategies.mesh.channel import Words
from labkit.strategies.mesh.roles import END
from labkit.strategies.mesh.roles import Roles
from labkit.strategies.parameter_server.optimizers import Entry
from labkit.strategies.parameter_server.optimizers import changes
from labkit.strategies.parameter_server.optimizers import entries_of
from labkit.strategies.parameter_server.optimizers import set_settings
from labkit.strategies.parameter_server.optimizers import settings_of
from labkit.strategies.parameter_server.optimizers import unpacked
from labkit.strategies.parameter_server.parts import flat
from labkit.strategies.parameter_server.parts import shape_of_part
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import optimizer_tensors
from labkit.train_options import TrainOptions

APART = (
    "workers are at different points of the loop: worker {one} {does}, and worker "
    "{other} {does_too}. Make what a worker decides by its own samples the same on all "
    "of them: dist.all_reduce the value that the condition tests, before it"
)
DOES = {
    "step": "takes a step",
    "fetch": "saves a checkpoint, or has ended its cell",
    "load": "sets the optimizer's state",
    "offer": "prepares a model",
    END: "has ended its cell",
}
CHANGED_APART = (
    "workers have changed parameters of the model in different ways. Make the same "
    "change on all of them, for example by the value of worker 0: dist.broadcast(p, "
    "src=0)"
)


class Watch(Protocol):
    """Measures a server's steps."""

    def begin(self, served: "Served", step: int) -> None:
        """The first gradients of this step are there to be received."""

    def have_come(self) -> None:
        """All gradients are here."""

    def end(self) -> None:
        """The parameters have been sent."""

    def note(self, text: str) -> None:
        """Show a sentence under the run."""


class Served:
    """A server's part of one model: the parameters, and the optimizer over them."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        buffers: list[torch.Tensor],
        channel: Channel,
    ) -> None:
        self._channel = channel
        self.parameters = parameters
        self.optimizer = optimizer
        self.buffers = buffers
        """Of the whole model, as the first worker has them; on the first server."""
        self.version = 0
        """Steps taken."""
        self.trained: set[int] = set()
        """The parameters that have had gradients."""

    def memory(self) -> dict[str, Tensors]:
        """The tensors that hold this server's part of the model states."""
        return {
            "parameters": [*self.parameters, *self.buffers],
            "gradients": [parameter.grad for parameter in self.parameters],
            "optimizer_state": optimizer_tensors(self.optimizer),
        }

    def communication_buffers(self) -> Tensors:
        """A server has none."""
        return ()

    @property
    def seconds_waited(self) -> float:
        """For the workers' messages, so far."""
        return self._channel.seconds_waited

    def facts(self) -> ModelFacts | None:
        """The workers say them."""
        return None

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's state, for one element of what has any."""
        held = sum(each.nbytes for each in optimizer_tensors(self.optimizer))
        elements = sum(self.parameters[number].numel() for number in self.trained)
        return held / max(1, elements)


@dataclass
class _Worker:
    """What a server knows of a worker."""

    clock: int = 0
    """Steps that it has pushed."""
    request: Words | None = None
    """What it asks of all workers together, once the others do so too."""
    reply: Callable[[], None] | None = None
    """Held back until slower workers have caught up."""


class Server:
    """Serves until the cell has ended on all workers."""

    def __init__(
        self, roles: Roles, device: torch.device, options: TrainOptions, watch: Watch
    ) -> None:
        self._roles = roles
        self._device = device
        self._options = options
        self._watch = watch
        self._channel = roles.channel
        self._place = roles.servers.index(self._channel.rank)
        self._served: dict[int, Served] = {}
        self._workers = {rank: _Worker() for rank in roles.workers}
        self._staleness: list[int] = []
        """Of every step."""

    def serve(self) -> None:
        """Answer the workers; returns when all have ended."""
        if self._options.asynchronous:
            self._serve_each()
            return
        while True:
            requests = [
                self._channel.hear(worker, has_limit=False)
                for worker in self._roles.workers
            ]
            if not self._answer(requests):
                return

    def _answer(self, requests: Sequence[Words]) -> bool:
        """Do what all workers ask together; whether they ask for more."""
        self._check_alike(requests)
        kind = requests[0]["kind"]
        if kind == END:
            return False
        getattr(self, f"_{kind}")(requests)
        return True

    def _check_alike(self, requests: Sequence[Words]) -> None:
        first, *others = requests
        for rank, words in zip(self._roles.workers[1:], others, strict=True):
            same = all(first.get(k) == words.get(k) for k in ("kind", "model"))
            if not same:
                one, other = DOES[first["kind"]], DOES[words["kind"]]
                worker = self._roles.workers[0]
                raise UnsupportedLoopError(
                    APART.format(one=worker, does=one, other=rank, does_too=other)
                )

    # ---- what all workers ask together ----

    def _offer(self, requests: Sequence[Words]) -> None:
        """Take a model and its optimizer."""
        first = requests[0]
        num_servers = len(self._roles.servers)
        parameters = [
            nn.Parameter(
                torch.empty(
                    shape_of_part(shape, self._place, num_servers),
                    dtype=dtype_named(dtype),
                    device=self._device,
                )
            )
            for shape, dtype in zip(first["shapes"], first["dtypes"], strict=True)
        ]
        self._channel.receive(self._roles.workers[0], map(flat, parameters))
        payload = store_of(self._channel.group).get(first["key"])
        optimizer = unpacked(payload, parameters)
        buffers = [
            torch.empty(shape, dtype=dtype_named(dtype), device=self._device)
            for shape, dtype in (first["buffers"] if self._place == 0 else ())
        ]
        self._served[first["model"]] = Served(
            parameters, optimizer, buffers, self._channel
        )
        for worker in self._roles.workers:
            self._channel.tell(worker, {})
            self._channel.send(worker, map(flat, parameters))
        self._channel.flush()

    def _load(self, requests: Sequence[Words]) -> None:
        """Take the optimizer's state from the first worker."""
        served = self._served[requests[0]["model"]]
        state: Any = defaultdict(dict)
        rows = []
        for words in requests[0]["entries"]:
            entry = Entry(*words)
            parameter = served.parameters[entry.number]
            if entry.shape is None:
                state[parameter][entry.key] = entry.plain_value()
                continue
            shape = parameter.shape if entry.is_divided else entry.shape
            tensor = torch.empty(shape, dtype=entry.torch_dtype, device=self._device)
            state[parameter][entry.key] = tensor
            rows.append(flat(tensor))
        self._channel.receive(self._roles.workers[0], rows)
        served.optimizer.state = state
        for worker in self._roles.workers:
            self._channel.tell(worker, {})
        self._channel.flush()

    def _fetch(self, requests: Sequence[Words]) -> None:
        """Give workers the state, and where they differ the parameters."""
        served = self._served[requests[0]["model"]]
        state, why = served.optimizer.state, ""
        entries: list[Entry] = []
        try:
            entries = entries_of(
                {n: state[p] for n, p in enumerate(served.parameters) if p in state},
                served.parameters,
            )
        except UnsupportedLoopError as error:
            why = str(error)
        for worker, words in zip(self._roles.workers, requests, strict=True):
            wanted = entries if words["state"] else []
            reply = {"version": served.version, "why": why}
            told = [each.words() for each in wanted]
            self._channel.tell(worker, {**reply, "entries": told})
            if self._options.asynchronous:
                self._channel.send(worker, map(flat, served.parameters))
            tensors = [each.tensor for each in wanted]
            self._channel.send(worker, [flat(t) for t in tensors if t is not None])
        self._channel.flush()

    def _step(self, requests: Sequence[Words]) -> None:
        """Average the gradients of all workers, clip, step, send the parameters."""
        served = self._served[requests[0]["model"]]
        self._check_step(requests)
        self._watch.begin(served, served.version + 1)
        sums: dict[int, torch.Tensor] = {}
        for worker, words in zip(self._roles.workers, requests, strict=True):
            self._receive_gradients(worker, words["given"], served, sums)
        for number, total in sums.items():
            served.parameters[number].grad = total.div_(len(requests))
        self._receive_values(requests[0], served)
        self._watch.have_come()
        set_settings(served.optimizer, requests[0]["settings"])
        norm, changed = self._update(served)
        for worker in self._roles.workers:
            self._send_parameters(worker, served, sorted(sums), norm, changed, 0)
        self._channel.flush()
        self._watch.end()

    def _check_step(self, requests: Sequence[Words]) -> None:
        first = requests[0]
        for words in requests[1:]:
            if words["batches"] != first["batches"] or words["clock"] != first["clock"]:
                raise UnsupportedLoopError(SKIPPED)
            if words["all_settings"] != first["all_settings"]:
                rates = ", ".join(f"{g.get('lr')}" for g in first["all_settings"])
                raise UnsupportedLoopError(OTHER_SETTINGS.format(rates=rates))
            if (words["changed"], words["sums"]) != (first["changed"], first["sums"]):
                raise UnsupportedLoopError(CHANGED_APART)

    # ---- parts of a step ----

    def _receive_gradients(
        self,
        worker: int,
        given: Sequence[int],
        served: Served,
        sums: dict[int, torch.Tensor],
    ) -> None:
        """Add those of a worker to the sums; one tensor at a time is on its way."""
        for number in given:
            parameter = served.parameters[number]
            gradient = torch.empty_like(parameter, requires_grad=False)
            self._channel.receive(worker, [flat(gradient)])
            if number in sums:
                sums[number].add_(gradient)
            else:
                sums[number] = gradient
        served.trained.update(given)

    def _receive_values(self, words: Words, served: Served) -> None:
        """What the loop has changed of the parameters, and the buffers."""
        first = self._roles.workers[0]
        changed = [served.parameters[number] for number in words["changed"]]
        self._channel.receive(first, map(flat, changed))
        self._channel.receive(first, map(flat, served.buffers))

    def _update(self, served: Served) -> tuple[float | None, Any]:
        """Clip and step; the norm before that, and the settings that this changed."""
        # Asynchronously a worker has the whole gradient of its step, and clips it.
        has_clip = self._options.clip is not None and not self._options.asynchronous
        norm = self._clip(served) if has_clip else None
        before = settings_of(served.optimizer)
        served.optimizer.step()
        for parameter in served.parameters:
            parameter.grad = None  # a zero_grad() of its own is the loop's to call
        served.version += 1
        return norm, changes(before, settings_of(served.optimizer))

    def _clip(self, served: Served) -> float:
        """Clip the whole gradient, of which the servers have a part each. Collective
        for them."""
        assert self._options.clip is not None
        gradients = [p.grad for p in served.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if len(self._roles.servers) > 1:
            first, *others = self._roles.servers
            squares = [float(norm.double().square())]
            if self._place == 0:
                squares += [self._channel.hear(o)["square"] for o in others]
                whole = math.sqrt(sum(squares))
                for other in others:
                    self._channel.tell(other, {"norm": whole})
            else:
                self._channel.tell(first, {"square": squares[0]})
                whole = self._channel.hear(first)["norm"]
            norm = norm.new_tensor(whole)
        nn.utils.clip_grads_with_norm_(served.parameters, self._options.clip, norm)
        return float(norm)

    def _send_parameters(
        self,
        worker: int,
        served: Served,
        numbers: Sequence[int],
        norm: float | None,
        changed: Any,
        staleness: int,
    ) -> None:
        """The answer to a worker's push: the parameters that have changed."""
        reply = {
            "updated": list(numbers),
            "settings": changed,
            "norm": norm,
            "version": served.version,
            "staleness": staleness,
            "state_bytes": served.state_bytes,
        }
        self._channel.tell(worker, reply)
        self._channel.send(worker, [flat(served.parameters[n]) for n in numbers])
        if worker != self._roles.workers[0]:
            self._channel.send(worker, map(flat, served.buffers))

    # ---- asynchronously ----

    def _serve_each(self) -> None:
        """As `serve`, but each push is a step of its own, as soon as it is there."""
        inbox = Inbox(self._channel, self._roles.workers, last=END)
        while True:
            source, words = inbox.next()
            if words["kind"] == "step":
                self._take_push(source, words)
            else:
                self._workers[source].request = words
            self._answer_the_held_back()
            asked = [each.request for each in self._workers.values()]
            requests = [request for request in asked if request is not None]
            if len(requests) == len(asked):
                for worker in self._workers.values():
                    worker.request = None
                if not self._answer(requests):
                    self._note_staleness()
                    return

    def _take_push(self, source: int, words: Words) -> None:
        """Step with one worker's gradients."""
        served, worker = self._served[words["model"]], self._workers[source]
        self._watch.begin(served, served.version + 1)
        gradients: dict[int, torch.Tensor] = {}
        self._receive_gradients(source, words["given"], served, gradients)
        if source == self._roles.workers[0]:
            self._receive_values(words, served)
        if words["counts"]:  # and is no stand-in for samples that this worker has not
            for number, gradient in gradients.items():
                served.parameters[number].grad = gradient
        self._watch.have_come()
        changed: Any = [{} for _ in served.optimizer.param_groups]
        staleness = served.version - words["version"]
        if words["counts"]:
            set_settings(served.optimizer, words["all_settings"])
            _, changed = self._update(served)
            self._staleness.append(staleness)
        worker.clock = words["clock"]

        def reply() -> None:
            numbers = sorted(served.trained)
            self._send_parameters(source, served, numbers, None, changed, staleness)
            self._channel.flush()

        worker.reply = reply

    def _answer_the_held_back(self) -> None:
        """Of workers that no slower one holds back any more."""
        bound = self._options.staleness
        # What waits for all workers together cannot be waited for.
        clocks = [w.clock for w in self._workers.values() if w.request is None]
        for worker in self._workers.values():
            if worker.reply is not None and (
                bound is None or worker.clock - min(clocks) <= bound
            ):
                reply, worker.reply = worker.reply, None
                reply()
        self._watch.end()

    def _note_staleness(self) -> None:
        if len(self._workers) > 1 and self._place == 0 and self._staleness:
            mean = sum(self._staleness) / len(self._staleness)
            self._watch.note(
                "--asynchronous: each push of a worker is a step of its own, so the "
                "losses are not those of one process. Between a worker's pull and the "
                f"step with its gradients the server took {mean:.3g} other steps on "
                f"average, {max(self._staleness)} at most"
            )


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch writes as `name`."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
