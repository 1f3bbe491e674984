"""Whether ranks still answer, while they are waited for."""

import time
from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from labkit import timeouts


class SilenceWatch:
    """Asks ranks again and again, so that a long wait ends with the last answer.

    What a rank does may take any time as long as its control thread answers. A dead one
    is not asked, and not waited for either.
    """

    def __init__(
        self, ranks: Sequence[int], ask: Callable[[int], "Future[Any]"]
    ) -> None:
        self._ask = ask
        self._answers: dict[int, Future[Any]] = {}
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._looked_at: float | None = None

    def silent(self, now: float | None = None) -> list[int]:
        """The ranks that have not answered for `SILENCE_S`; to be called often."""
        now = time.monotonic() if now is None else now
        # Of a machine that slept, or a notebook that was stopped, one look counts for
        # no more than one question does.
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        passed = min(passed, timeouts.ASK_S)
        self._looked_at = now
        for rank in self._silent_s:
            self._silent_s[rank] += passed
            answer = self._answers.get(rank)
            if answer is None or (
                answer.done() and self._silent_s[rank] >= timeouts.ASK_S
            ):
                self._answers[rank] = self._ask(rank)
                self._silent_s[rank] = 0.0
        return [
            rank
            for rank, silent_s in self._silent_s.items()
            if silent_s >= timeouts.SILENCE_S and not self._answers[rank].done()
        ]
