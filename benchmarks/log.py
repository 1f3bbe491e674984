"""What a call of `log(loss=...)` costs the training loop, in a raw run on two ranks.

Between two calls the rank computes a little, as a loop does, which is not counted.
"""

from _measure import parser
from _measure import print_table
from _measure import spread

from labkit import Lab

TARGET_US = 10

CELL = """
import time
weight = torch.randn(64, 64)
kinds = {{"float": 0.5, "CPU tensor": torch.tensor(0.5)}}
costs = {{kind: [] for kind in kinds}}
for _ in range({calls}):
    for kind, value in kinds.items():
        weight @ weight
        began = time.perf_counter_ns()
        log(loss=value)
        costs[kind].append((time.perf_counter_ns() - began) / 1000)
"""


def main() -> None:
    args = parser(__doc__, calls=20_000).parse_args()
    with Lab(2, device="cpu") as lab:
        lab.train("raw", CELL.format(calls=args.calls))
        by_rank = lab.pull("costs", ranks="all")
    print_table(
        f"Microseconds for one log(loss=value), {args.calls} calls on each rank",
        ["value", "rank", "median", "p95", "worst", "target"],
        [
            [kind, rank, *spread(costs[kind]), f"{TARGET_US} (median)"]
            for kind in ("float", "CPU tensor")
            for rank, costs in enumerate(by_rank)
        ],
    )


if __name__ == "__main__":
    main()
