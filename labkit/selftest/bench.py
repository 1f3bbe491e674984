"""What a check has to work with: a lab of its own, and what it says of the outcome."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from labkit.checks import UserError
from labkit.lab import Lab
from labkit.selftest.machine import Machine


class CheckFailedError(Exception):
    """What was checked is not as it should be; the message says how."""


@dataclass(frozen=True)
class Measured:
    """What a check has found, where all is right."""

    text: str
    advice: str = ""
    """What to look at, where it could be better."""


@dataclass(eq=False)
class Bench:
    """The lab of the checks, started where it is not there, and what they share."""

    folder: Path
    """For files; it is gone after the last check."""
    machine: Machine
    start_options: Mapping[str, Any] = field(default_factory=dict)
    """As `Lab` takes them."""
    on_progress: Callable[[str], None] = lambda text: None
    reference: list[float] = field(default_factory=list)
    """Losses of one process, once a check has needed them."""
    is_over: bool = field(default=False, init=False)
    """No other lab may start."""
    _lab: Lab | None = field(default=None, init=False)
    _labs: list[Lab] = field(default_factory=list, init=False)

    @property
    def has_lab(self) -> bool:
        """Whether a lab is there, so that none has to start."""
        return self._lab is not None and self._lab.is_running

    @property
    def lab(self) -> Lab:
        """The lab; another one where there is none any more."""
        return self.ensure_lab()

    def ensure_lab(self) -> Lab:
        """Start a lab where there is none."""
        if self._lab is None or not self._lab.is_running:
            self._lab = self.start(**self.start_options)
        return self._lab

    def use(self, lab: Lab) -> None:
        """Have the checks use this lab."""
        self._lab = lab

    def start(self, **options: Any) -> Lab:
        """A lab that ends with the bench, if not before."""
        lab = Lab(**options, on_progress=self._on_stage)
        self._labs.append(lab)
        self._check_not_over()
        return lab

    def _on_stage(self, text: str) -> None:
        self._check_not_over()
        self.on_progress(text)

    def _check_not_over(self) -> None:
        if self.is_over:
            self.stop_labs()
            raise UserError("the checks were stopped")

    def where(self) -> str:
        """Where the ranks are, in a line for each."""
        if self._lab is None or not self._lab.is_running:
            return "no rank is running"
        with contextlib.suppress(Exception):
            return "\n".join(self._lab.stack().lines())
        return "the ranks do not say where they are"

    def stop_labs(self) -> None:
        """Stop every lab; the next check has another. From any thread."""
        for lab in list(self._labs):
            lab.stop()  # an interrupt comes after it, and the next call has the others
            with contextlib.suppress(ValueError):  # of another thread's call
                self._labs.remove(lab)

    def end(self) -> None:
        """Stop every lab, for good. From any thread."""
        self.is_over = True
        self.stop_labs()

    # ---- what several checks do ----

    def pull(self, name: str) -> list[Any]:
        """A variable of every rank, in rank order."""
        found = self.lab.pull(name, "all")
        return found if self.lab.world_size > 1 else [found]

    @contextlib.contextmanager
    def keeping_all(self, *, lost: int | None = None) -> Iterator[None]:
        """What is caused in this block costs no rank its variables, but the rank
        `lost`, and the next cell works."""
        lab = self.lab
        lab.run("labkit_kept = 100 + rank")
        yield
        lab.run(
            "labkit_found = globals().get('labkit_kept')\n"
            "labkit_total = torch.full((3,), rank + 1.0, device=device)\n"
            "dist.all_reduce(labkit_total)\n"
            "labkit_total = labkit_total.tolist()",
            timeout=30,
        )
        for rank, kept in enumerate(self.pull("labkit_found")):
            if rank != lost and kept != 100 + rank:
                raise CheckFailedError(f"rank {rank} has lost its variables")
        right = [lab.world_size * (lab.world_size + 1) / 2] * 3
        for rank, total in enumerate(self.pull("labkit_total")):
            if total != right:
                raise CheckFailedError(
                    f"after it, an all-reduce gave {total} on rank {rank}; {right} "
                    "is right"
                )
