"""Exercises and tables about memory: what a rank holds, and what fits."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache

import pandas as pd
import torch

from labkit.course.exercise import Verdict
from labkit.estimate.arguments import cross_entropy
from labkit.estimate.plans import Plan
from labkit.models import GPT
from labkit.strategies import find_strategy

GPU_BYTES = 80e9
SEQUENCE = 2048
SIZES = {
    "7 B": {"dim": 4096, "num_heads": 32, "num_layers": 34},
    "70 B": {"dim": 8192, "num_heads": 64, "num_layers": 86},
}


@cache
def gpt_of(size: str) -> GPT:
    """A GPT of "7 B" or "70 B" parameters, without memory: on the meta device."""
    with torch.device("meta"):
        return GPT(50257, context=SEQUENCE, **SIZES[size])


@cache
def plan_of(size: str) -> Plan:
    """What one step of it needs in bf16, with activation checkpointing and AdamW."""
    tokens = torch.empty(1, SEQUENCE, dtype=torch.int64, device="meta")
    return Plan(
        gpt_of(size), ((tokens,), {}), cross_entropy, None, 1, "bf16", True, "cpu"
    )


def needed_bytes(size: str, strategy: str, num_gpus: int) -> float:
    """Bytes of a rank, in `prepare` or in a step on one sequence of 2,048 tokens."""
    plan, value = plan_of(size), find_strategy(strategy)
    step = plan.memory(value, num_gpus, batch_size=num_gpus)["total_peak"]
    return max(step, plan.setup(value, num_gpus))


def memory_by_gpus(
    size: str, strategies: Iterable[str], num_gpus: Sequence[int]
) -> pd.DataFrame:
    """Bytes of a rank, by number of GPUs (rows) and strategy (columns)."""
    columns = {
        strategy: [needed_bytes(size, strategy, n) for n in num_gpus]
        for strategy in strategies
    }
    return pd.DataFrame(columns, index=pd.Index(num_gpus, name="GPUs"))


def fewest_by_card(
    tables: Mapping[str, pd.DataFrame], cards: Sequence[int] = (24, 40, 80, 141)
) -> pd.DataFrame:
    """The fewest GPUs in a table of `memory_by_gpus` that fit cards of so many GB."""
    rows = {}
    for size, table in tables.items():
        for card in cards:
            fits = table <= card * 1e9
            least = [fits.index[fits[name]].min() for name in table]
            rows[size, f"{card} GB"] = ["-" if n != n else str(n) for n in least]
    found = pd.DataFrame.from_dict(rows, orient="index", columns=[*table])
    found.index = pd.MultiIndex.from_tuples(rows, names=["", "card"])
    return found


def least_that_fits(size: str, strategy: str, most: int) -> int | None:
    """The fewest GPUs of 80 GB, of up to `most`; None where those are too few."""
    if needed_bytes(size, strategy, most) > GPU_BYTES:
        return None
    low, high = 0, most  # `low` is too few, `high` fits
    while high - low > 1:
        middle = (low + high) // 2
        if needed_bytes(size, strategy, middle) > GPU_BYTES:
            low = middle
        else:
            high = middle
    return high


def fewest_gpus(seven: tuple[int, str], seventy: tuple[int, str]) -> Verdict:
    """Judge (number of GPUs, strategy) for 7 B and for 70 B parameters."""
    answers = {"7 B": seven, "70 B": seventy}
    for size, (num_gpus, strategy) in answers.items():
        needs = needed_bytes(size, strategy, num_gpus)
        if needs > GPU_BYTES:
            return Verdict(
                complaint=f"{size} parameters under {strategy} on {num_gpus} GPUs "
                f"need {needs / 1e9:.1f} GB of each, which has 80"
            )
    fewest = 0
    for size, (num_gpus, _) in answers.items():
        found = (
            least_that_fits(size, strategy, num_gpus)
            for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        )
        fewest += min(number for number in found if number)
    total = seven[0] + seventy[0]
    return Verdict(f"{total} GPUs for both", f"{fewest}", is_beaten=total <= fewest)
