"""labkit beside its peers: Monarch, nbdistributed, ipyparallel and others.

`make bench` and `make bench-quick` make the environments that this needs, and run it.
Every peer is driven through a real kernel of its own environment, torchrun through the
shell. It prints the table, says which ratios have fallen against the committed figures,
and leaves figures, page and picture in test-artifacts/bench. With --write they become
the committed ones.
"""

import json
import signal
import sys
from pathlib import Path

from _measure import parser
from peers import report
from peers import runner

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).parent / "peers"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="two ranks, four minutes")
    made.add_argument("--only", default=",".join(runner.SESSIONS), help="NAME,NAME")
    made.add_argument("--write", action="store_true", help="commit to these figures")
    args = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and clean up
    names = [name for name in runner.SESSIONS if name in args.only.split(",")]
    plan = runner.QUICK if args.quick else runner.FULL
    figures = runner.Bench(names, plan).run()

    name = "figures-quick.json" if args.quick else "figures.json"
    committed = COMMITTED / name
    print(report.page(figures))
    if committed.exists():
        for line in report.fallen(figures, json.loads(committed.read_text())):
            print(f"FELL  {line}")
    out = ROOT / "test-artifacts" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    files = (out / name, out / "peers.md", out / "peers.png")
    if args.write:
        files = (committed, ROOT / "docs/about/peers.md", ROOT / "docs/peers.png")
    report.write(figures, *files)
    print("written:", *(path.relative_to(ROOT) for path in files))


if __name__ == "__main__":
    main()
