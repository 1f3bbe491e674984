"""Whether every record arrives: ranks log a thousand a second for ten seconds each.

What arrived is what the notebook has, and what `labkit.load_run` reads from disk.
"""

from _measure import parser
from _measure import print_table

from labkit import Lab
from labkit import Run
from labkit import load_run

# Paced by the clock and not by sleeping a while after each: no drift.
CELL = """
import time
began = time.perf_counter()
for number in range({rate} * {seconds}):
    time.sleep(max(0, began + number / {rate} - time.perf_counter()))
    log(value=number)
took = time.perf_counter() - began
"""


def main() -> None:
    args = parser(__doc__, ranks=2, rate=1000, seconds=10).parse_args()
    with Lab(args.ranks, device="cpu") as lab:
        run = lab.train("raw", CELL.format(rate=args.rate, seconds=args.seconds))
        took = [lab.pull("took", rank) for rank in range(args.ranks)]
    num_sent = args.rate * args.seconds
    for place, found in (("notebook", run), ("disk", load_run(run.name))):
        print_table(
            f"Records sent and in the {place}, {args.rate} a second on each of "
            f"{args.ranks} ranks",
            ["rank", "sent", "per second", "received", "lost", "exact and in order"],
            [
                [rank, num_sent, f"{num_sent / s:.0f}", *arrived(found, rank, num_sent)]
                for rank, s in enumerate(took)
            ],
        )


def arrived(run: Run, rank: int, num_sent: int) -> tuple[int, int, str]:
    """Received, lost, and whether what came is what was sent, in its order."""
    sent = list(range(num_sent))
    values = run.collector.series(rank, "value")["value"].tolist()
    lost = len(set(sent).difference(values))
    return len(values), lost, "yes" if values == sent else "NO"


if __name__ == "__main__":
    main()
