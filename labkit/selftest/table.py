"""The checks, in the order in which they run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from labkit.selftest import failures
from labkit.selftest import training
from labkit.selftest.bench import Bench
from labkit.selftest.bench import Measured
from labkit.strategies import STRATEGIES


@dataclass(frozen=True)
class Check:
    """One check: what it is, and what it needs."""

    name: str
    """As `--only` takes it."""
    what: str
    run: Callable[[Bench], Measured]
    limit_s: float = 60.0
    """What is not over by then has failed."""
    num_ranks: int = 1
    """It needs at least so many."""
    needs_gpu: bool = False
    crashes_over: str = ""
    """The backend over which torch crashes in it, where ranks are on GPUs."""

    def not_applicable(self, *, num_ranks: int, device: str, backend: str) -> str:
        """Why it is not for so many ranks on this device; "" where it is."""
        if self.needs_gpu and device != "cuda":
            return "for ranks on GPUs"
        if device == "cuda" and backend == self.crashes_over:
            return (
                f"over {backend} torch crashes in it on GPUs: it needs a GPU for each "
                "rank, or --device cpu"
            )
        if num_ranks < self.num_ranks:
            how = " --backend gloo, on one GPU" if device == "cuda" else ""
            return f"it needs {self.num_ranks} ranks: -n {self.num_ranks}{how}"
        return ""


_TWO_RANKS = partial(Check, num_ranks=2)
_ON_GPUS = partial(Check, num_ranks=2, needs_gpu=True)

CHECKS = {
    check.name: check
    for check in (
        Check("all-reduce", "collectives are right", training.all_reduce),
        _TWO_RANKS("bandwidth", "speed of an all-reduce", training.bandwidth, 100.0),
        *(
            Check(
                name,
                f"{name} against one process",
                partial(training.strategy, name),
                120.0,  # the first under ZeRO loads DeepSpeed
                num_ranks=2 if strategy.server else 1,
                crashes_over="gloo" if name == "tensor" else "",
            )
            for name, strategy in STRATEGIES.items()
            if not (strategy.is_by_hand or strategy.is_single)
        ),
        Check("memory", "memory as measured", training.memory),
        Check("groups", "process groups of runs", training.groups, 120.0),
        Check("checkpoint", "a checkpoint across strategies", training.checkpoint, 90),
        _TWO_RANKS("raise", "a rank raises", failures.rank_raises),
        _TWO_RANKS("interrupt", "interrupt in a collective", failures.interrupted),
        _TWO_RANKS("timeout", "--timeout in a collective", failures.timed_out),
        _ON_GPUS(
            "timeout-sharded",
            "--timeout beside idle communicators",
            failures.timed_out_sharded,
            120.0,
        ),
        Check("kill", "a rank is killed and brought back", failures.killed),
        _ON_GPUS(
            "kill-restarting",
            "a rank is killed while the group forms",
            failures.killed_while_restarting,
            180.0,
        ),
        Check("out-of-memory", "out of memory on purpose", failures.out_of_memory),
        _ON_GPUS(
            "device-assert", "an assert on the device", failures.asserted_on_device, 90
        ),
        Check(
            "shared-gpu",
            "several ranks on one GPU",
            training.shared_gpu,
            180.0,
            needs_gpu=True,
        ),
    )
}
