"""Exercises and tables about memory: what a rank holds, when, and what fits."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.compat.data_parallel import groups_of
from labkit.compat.data_parallel import whole_of
from labkit.course.exercise import Verdict
from labkit.estimate.arguments import cross_entropy
from labkit.estimate.plans import Plan
from labkit.estimate.rows import Row
from labkit.models import GPT
from labkit.models import next_token_loss
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
    plan, row = plan_of(size), Row(find_strategy(strategy), num_gpus)
    step = plan.memory(row, batch_size=num_gpus)["total_peak"]
    return max(step, plan.setup(row))


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
    for size, answer in answers.items():
        match answer:
            case (int(number), str()) if number > 0:
                pass
            case _:
                return Verdict(
                    complaint=f"for {size} it is {answer!r}; give a number of GPUs and "
                    'a strategy, such as (8, "zero2")'
                )
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


Moments = list[tuple[str, list[float]]]


def gathered_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that a module under FSDP holds in full at the moment."""
    parts = [
        whole_of(parameter)
        for each in module.modules()
        for group in groups_of(each)
        for parameter in group.fsdp_params
    ]
    return sum(p.untyped_storage().nbytes() for p in parts if p is not None)


def watch_gathered(model: GPT, *, every_layer: bool = False) -> Moments:
    """A list to which each later step adds what the root and the blocks hold in full,
    whenever the computation comes by a block's attention, or by any layer."""
    moments: Moments = []

    def note(what: str) -> None:
        blocks = [float(gathered_bytes(block)) for block in model.blocks]
        moments.append((what, [gathered_bytes(model) - sum(blocks), *blocks]))

    def watch(layer: nn.Module, number: int) -> None:
        layer.register_forward_pre_hook(lambda *_: note(f"forward {number}"))
        layer.register_full_backward_pre_hook(lambda *_: note(f"backward {number}"))

    for number, block in enumerate(model.blocks):
        layers = [each for each in block.modules() if not any(each.children())]
        for layer in layers if every_layer else layers[1:2]:
            watch(layer, number)
    return moments


def halve_the_blocks(shard: Callable[[GPT], object]) -> Verdict:
    """Judge `shard(model)`, which calls `fully_shard` on parts of a GPT, in place."""
    torch.manual_seed(0)
    plain, model = GPT(context=16), GPT(context=16)
    model.load_state_dict(plain.state_dict())
    in_block = sum(4 * each.numel() for each in plain.blocks[0].parameters())
    of_root = sum(4 * each.numel() for each in plain.parameters()) - (
        len(plain.blocks) * in_block
    )
    shard(model)
    device = next(model.parameters()).device
    plain.to(device)
    tokens = torch.arange(17).repeat(2, 1).to(device)
    x, y = tokens[:, :-1], tokens[:, 1:]
    held = 0  # elements that this rank keeps
    for parameter in model.parameters():
        held += (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
        ).numel()
    whole = sum(each.numel() for each in plain.parameters())
    complaint = ""
    if held > 1.1 * whole / dist.get_world_size():
        complaint = f"a rank keeps {held} of {whole} elements between steps"
    moments = watch_gathered(model, every_layer=True)
    for each in (plain, model):
        next_token_loss(each(x), y).backward()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    for (name, one), other in pairs:
        found, expected = other.grad, one.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        assert expected is not None
        is_same = found is not None and torch.allclose(found, expected, atol=1e-5)
        if not is_same and not complaint:
            complaint = f"the gradient of {name} differs from the plain model's"
    if complaint:
        return Verdict(complaint=complaint)
    most = max(sum(held) for _, held in moments) - of_root
    return Verdict(
        f"blocks hold {most / in_block:.2f} of a block in full",
        "0.5 of a block",
        is_beaten=most <= in_block / 2,
    )
