"""labkit beside its peers: Monarch, nbdistributed, ipyparallel and others.

`make bench` and `make bench-quick` make the environments that this needs, and run it.
Every peer is driven through a real kernel of its own environment, torchrun through the
shell. The script prints the table, names ratios that have fallen since the committed
figures, and writes figures, page and picture to test-artifacts/bench; with --write, a
full run replaces the committed ones.
"""

import json
import signal
import sys
from pathlib import Path

from _measure import parser
from peers import report
from peers import runner

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).parent / "peers" / "figures.json"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="in under three minutes")
    made.add_argument("--only", default=",".join(runner.SESSIONS), help="NAME,NAME")
    made.add_argument(
        "--write", action="store_true", help="replace the committed figures"
    )
    args = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and clean up
    names = [name for name in runner.SESSIONS if name in args.only.split(",")]
    if args.write and (args.quick or len(names) < len(runner.SESSIONS)):
        made.error("--write takes a full run: leave out --quick and --only")
    plan = runner.QUICK if args.quick else runner.FULL
    figures = runner.Bench(names, plan).run()

    print(report.page(figures))
    for line in report.fallen(figures, json.loads(COMMITTED.read_text())):
        print(f"FELL  {line}")
    out = ROOT / "test-artifacts" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    files = (out / "figures.json", out / "peers.md", out / "peers.png")
    if args.write:
        files = (COMMITTED, ROOT / "docs/about/peers.md", ROOT / "docs/peers.png")
    report.write(figures, *files)
    print("written:", *(path.relative_to(ROOT) for path in files))


if __name__ == "__main__":
    main()
