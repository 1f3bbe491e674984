"""Every strategy on a small GPT: steps/s, memory and bytes against theory and forecast.

The same cell under each strategy, on 2 and on 4 ranks: 0.8 M parameters, AdamW, fp32,
16 sequences of 64 bytes in a batch. Bytes are those of the rank that has most. Beside
what was measured stand theory (model states alone, and bytes sent) and what
`lab.estimate` predicted before.
"""

from _measure import parser
from _measure import print_table

from labkit import Lab

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
model, optimizer, loader = prepare(model, optimizer, data, batch_size={batch})
for _, (x, y) in zip(range({steps}), loader):
    next_token_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
STATES = ("parameters", "gradients", "optimizer_state", "master_parameters")
HEADER = [
    "strategy",
    "steps/s",
    *(name.split("_")[0] + " m/t/p" for name in STATES),
    "buffers",
    "activations m/p",
    "peak m/p",
    "sent m/t",
]


def main() -> None:
    args = parser(__doc__, steps=60, batch=16).parse_args()
    for num_ranks in (2, 4):
        with Lab(num_ranks=num_ranks, device="cpu") as lab:
            rows = [row(lab, strategy, args) for strategy in STRATEGIES]
        print_table(
            f"{num_ranks} ranks; MiB of a rank: measured / theory / predicted",
            HEADER,
            rows,
        )


def row(lab: Lab, strategy: str, args: object) -> list[str]:
    """One strategy's figures."""
    from labkit.models import GPT

    batch, steps = vars(args)["batch"], vars(args)["steps"]
    code = CELL.format(sequence=SEQUENCE, batch=batch, steps=steps)
    forecast = lab.estimate(GPT(context=SEQUENCE), batch_size=batch, sequence=SEQUENCE)
    predicted = forecast.table.loc[lab.world_size, strategy]
    run = lab.train(strategy, code, name=strategy, live=False)
    found = lab.compare(strategy).iloc[0]

    def figures(*values: float) -> str:
        return " / ".join(f"{value / MIB:.2f}" for value in values)

    return [
        strategy,
        f"{found['steps_per_s']:.1f}",
        *(figures(found[s], run.theory[s], predicted[s]) for s in STATES),
        figures(found["communication_buffers"]),
        figures(found["activations_peak"], predicted["activations_peak"]),
        figures(found["total_peak"], predicted["total_peak"]),
        figures(found["wire_bytes"], found["wire_bytes_theory"]),
    ]


if __name__ == "__main__":
    main()
