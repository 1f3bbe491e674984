"""Messages between two ranks: words, and tensors after them."""

import json
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.compat.torch import no_dispatch

_HEADER, _WORDS, _TENSORS = 1, 2, 3
"""Tags: what is sent under one is not taken for another."""
_NO_LIMIT = timedelta(days=365)

Words = dict[str, Any]
"""What JSON can hold: gloo asks nobody who sends, so nothing is unpickled."""


@dataclass
class Channel:
    """This rank's messages to and from others of `group`.

    Words go through `control`, a gloo group of the same ranks, and are no part of what
    is measured of a step; tensors go through `group`, but for those to a lower rank,
    which go through `downward` where that is given.
    """

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    device: torch.device
    downward: dist.ProcessGroup | None = None
    seconds_waited: float = 0.0
    """For what others were to send, so far; not for words that may come at any time,
    which threads of their own wait for."""
    _sending: list[tuple[Any, torch.Tensor, dist.ProcessGroup]] = field(
        default_factory=list
    )

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    # ---- words ----

    def tell(self, to: int, words: Words) -> None:
        """Send `words`; returns before they have arrived."""
        payload = bytearray(json.dumps(words).encode())
        with no_dispatch():
            header = torch.tensor([len(payload)])
            self._send(header, to, self.control, _HEADER)
            sent = torch.frombuffer(payload, dtype=torch.uint8)
            self._send(sent, to, self.control, _WORDS)

    def hear(self, source: int, *, has_limit: bool = True) -> Words:
        """The next words of rank `source`; without a limit it may wait for longer than
        the timeout of the group."""
        # By name: gloo frees nobody from a wait for whichever rank comes first.
        began = time.perf_counter()
        with no_dispatch():
            size = torch.zeros(1, dtype=torch.int64)
            group = self.control
            work = dist.irecv(size, group=group, group_src=source, tag=_HEADER)
            _wait(work, None if has_limit else _NO_LIMIT)
            payload = torch.empty(int(size), dtype=torch.uint8)
            _wait(dist.irecv(payload, group=group, group_src=source, tag=_WORDS))
        if has_limit:
            self.seconds_waited += time.perf_counter() - began
        found: Words = json.loads(payload.numpy().tobytes())
        return found

    # ---- tensors: contiguous ones ----

    def send(self, to: int, tensors: Iterable[torch.Tensor]) -> None:
        """Send them in order; returns before they have arrived. They must stay as they
        are until `flush`."""
        for tensor in tensors:
            if tensor.numel():
                group = self._towards(to, self.rank)
                self._send(self._as_sent(as_real(tensor)), to, group, _TENSORS)

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        sending, self._sending = self._sending, []
        groups = self.group, self.control, self.downward
        for work, _, group in sending:
            # Of a group that has been re-created since, it never arrives.
            if any(group is each for each in groups):
                _wait(work)

    def receive(self, source: int, tensors: Iterable[torch.Tensor]) -> None:
        """Fill them with what rank `source` sends."""
        began = time.perf_counter()
        waiting = []
        for tensor in map(as_real, tensors):
            if tensor.numel():
                place = self._as_sent(tensor)
                tag = self._tag(_TENSORS)
                group = self._towards(self.rank, source)
                work = dist.irecv(place, group=group, group_src=source, tag=tag)
                waiting.append((work, place, tensor))
        for work, place, tensor in waiting:
            _wait(work)
            if place is not tensor:
                tensor.copy_(place)
        self.seconds_waited += time.perf_counter() - began

    def _towards(self, to: int, source: int) -> dist.ProcessGroup:
        return self.group if self.downward is None or to > source else self.downward

    def _send(
        self, tensor: torch.Tensor, to: int, group: dist.ProcessGroup, tag: int
    ) -> None:
        tag = tag if group is self.control else self._tag(tag)
        work = dist.isend(tensor, group=group, group_dst=to, tag=tag)
        self._sending.append((work, tensor, group))

    def _tag(self, tag: int) -> int:
        return tag if self.group is self.control else 0  # NCCL has none

    def _as_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the backend takes it: gloo none that is on a GPU, NCCL no other, as the
        states of an optimizer that has trained on the CPU."""
        return tensor.to("cpu" if self.group is self.control else self.device)


class Inbox:
    """What several ranks say, in the order in which it comes."""

    def __init__(self, channel: Channel, sources: Iterable[int], last: str) -> None:
        """Words of the kind `last` are the last ones of a rank."""
        self._channel = channel
        self._last = last
        self._came: queue.SimpleQueue[tuple[int, Words | RuntimeError]]
        self._came = queue.SimpleQueue()
        # A thread for each: gloo cannot wait for several by name, and frees nobody
        # from a wait for whichever rank comes first.
        for source in sources:
            name = f"labkit-inbox-{source}"
            threading.Thread(
                target=self._listen, args=(source,), name=name, daemon=True
            ).start()

    def next(self) -> tuple[int, Words]:
        """A rank and what it says; waits for as long as it takes."""
        source, words = self._came.get()
        if isinstance(words, RuntimeError):
            raise words
        return source, words

    def _listen(self, source: int) -> None:
        kind = None
        while kind != self._last:
            try:
                words = self._channel.hear(source, has_limit=False)
            except RuntimeError as error:
                self._came.put((source, error))
                return
            kind = words["kind"]
            self._came.put((source, words))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, in the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wait(work: Any, limit: timedelta | None = None) -> None:
    """Wait for one message."""
    try:
        _ = work.wait() if limit is None else work.wait(limit)
    except RuntimeError:
        _let_signals_in()
        raise


def _let_signals_in() -> None:
    """An interrupt that has come meanwhile is raised where a function begins: here, and
    not in what is cleaned up after the error, where it would be lost."""
