"""Every strategy on a small GPT: against one process, ddp, theory and forecast.

The same cell under each strategy, on 2 and on 4 ranks: 0.8 M parameters, AdamW,
sequences of 64 bytes, 16 in a batch. Bytes are those of the rank that has most. Beside
what was measured stand theory (model states, and bytes sent) and what `lab.estimate`
predicted before (the peak). The first column of numbers is how far the weights are from
those of one process after a few steps, at most: with --comm and --average-every they
are to differ. Speed is in steps/s, after those.
"""

from collections.abc import Iterator
from typing import Any

import torch
from _measure import parser
from _measure import print_table

from labkit import Lab
from labkit.models import GPT
from labkit.notebook.plots.estimate_plot import Forecast

MIB = 2**20
SEQUENCE = 64
CELL = """
import argparse
from labkit.data import text
from labkit.models import GPT
from labkit.models import next_token_loss

torch.manual_seed(0)
model = GPT(context={sequence})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = text(argparse.__file__, block_size={sequence})
data = torch.utils.data.Subset(data, range({samples}))
fit(model, data, next_token_loss, optimizer=optimizer, batch_size={batch})
"""
NUM_COMPARED = 5
"""Steps: Adam divides by the size of gradients, so that rounding grows."""
ALIKE = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "pipeline")
GRIDS = {"tensor": "dp=2,tp=2", "pipeline": "dp=2,pp=2"}
COMM = ("fp16", "bf16", "powersgd", "topk")
STATES = ("parameters", "gradients", "optimizer_state", "master_parameters")
HEADER = [
    *("strategy", "difference", "steps/s", "of ddp"),
    *("states m/t", "activations m/p", "peak m/p", "sent m/t"),
]


def main() -> None:
    made = parser(__doc__, steps=40, batch=16)
    made.add_argument("--precision", default="fp32", help="default: fp32")
    args = made.parse_args()
    for num_ranks in (2, 4):
        with Lab(num_ranks=num_ranks, device="cpu") as lab:
            rows = list(rows_of(lab, args.steps, args.batch, args.precision))
        print_table(
            f"{num_ranks} ranks, {args.precision}; MiB of a rank: measured / theory, "
            "or measured / predicted",
            HEADER,
            rows,
        )


def options_of(num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each strategy with the options that make it another technique."""
    yield "single", {}
    for strategy in ALIKE:
        yield strategy, {}
        if num_ranks == 4 and strategy in GRIDS:
            yield strategy, {"mesh": GRIDS[strategy]}
    yield "parameter_server", {}
    for method in COMM:
        yield "ddp", {"comm": method}
    yield "ddp", {"average_every": 4}


def rows_of(lab: Lab, steps: int, batch: int, precision: str) -> Iterator[list[str]]:
    forecast = lab.estimate(
        GPT(context=SEQUENCE),
        batch_size=batch,
        sequence=SEQUENCE,
        precision=precision,
    )
    reference: dict[str, torch.Tensor] = {}
    speed_of_ddp = float("nan")
    for strategy, given in options_of(lab.world_size):
        options = {**given, "precision": precision, "live": False}
        weights = train(lab, strategy, NUM_COMPARED, batch, options)[1]
        reference = reference or weights
        difference = max(
            float((weights[name] - reference[name]).abs().max()) for name in reference
        )
        run = train(lab, strategy, steps, batch, options)[0]
        found = lab.compare(run.name).iloc[0]
        speed = float(found["steps_per_s"])
        if strategy == "ddp" and not given:
            speed_of_ddp = speed
        words = " ".join([strategy, *(f"--{k} {v}" for k, v in given.items())])
        activations, peak = predicted(forecast, lab.world_size, words)
        yield [
            words.replace("_every", "-every"),
            f"{difference:.1e}",
            f"{speed:.1f}",
            f"{speed / speed_of_ddp:.2f}",
            figures(
                sum(found[each] for each in STATES),
                sum(run.theory[each] for each in STATES),
            ),
            figures(found["activations_peak"], activations),
            figures(found["total_peak"], peak),
            figures(found["wire_bytes"], found["wire_bytes_theory"]),
        ]


def train(
    lab: Lab, strategy: str, steps: int, batch: int, options: dict[str, Any]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A run, and the weights after it."""
    code = CELL.format(sequence=SEQUENCE, batch=batch, samples=steps * batch)
    run = lab.train(strategy, code, **options)
    return run, lab.pull("model", full=True)


def predicted(forecast: Forecast, num_ranks: int, words: str) -> tuple[float, float]:
    """Activations and peak of a row, where there is one."""
    nothing = float("nan"), float("nan")
    table = forecast.table.loc[num_ranks]
    if words not in table.index:
        return nothing
    row = table.loc[words]
    return float(row["activations_peak"]), float(row["total_peak"])


def figures(*values: float) -> str:
    return " / ".join(f"{value / MIB:.2f}" for value in values)


if __name__ == "__main__":
    main()
