"""What a host costs: start, memory and traffic.

`--hosts node1:1,node2:1` names hosts that ssh reaches, as --launcher ssh does;
`python tests/hosts/namespaces.py .venv/bin/python benchmarks/hosts.py` has two of its
own, node1 and node2. Labs on the first host, the first two and so on start in turns
with labs of as many ranks on this one. Memory (PSS: what several share counts once) is
what a host has besides its ranks. Bytes are those of a host's network interfaces, sent
and received, for a rank and step: of the same DDP loop by hand and by `prepare`, each
at two lengths, so that what a cell costs once is not in them.
"""

import time
from collections.abc import Callable
from statistics import median

from _measure import parser
from _measure import print_table

from labkit import Lab

LOOK = """
import os
import psutil
from pathlib import Path
lines = Path("/proc/net/dev").read_text().splitlines()[2:]
counts = {name: [*map(int, rest.split())]
          for name, rest in (line.split(":") for line in lines)}
traffic = sum(c[0] + c[8] for name, c in counts.items() if name.strip() != "lo")
server = psutil.Process().parent()
beside = [server, server.parent()]
pss = sum(process.memory_full_info().pss for process in beside)
"""
LOOP = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(),
                            torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(3200, 64), torch.randn(3200, 1))
{wrap}
for epoch in range({epochs}):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
STEPS_OF_EPOCH = 50
BY_HAND = """
model = torch.nn.parallel.DistributedDataParallel(model)
sampler = torch.utils.data.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, 64 // world_size, sampler=sampler)
"""
PREPARED = """
model, optimizer, loader = prepare(model, optimizer, dataset, batch_size=64)
"""


def main() -> None:
    made = parser(__doc__, tries=3, epochs=40)
    made.add_argument("--hosts", default="node1:1,node2:1", help="default: %(default)s")
    args = made.parse_args()
    hosts = args.hosts.split(",")
    starts = [start_row(hosts[: n + 1], args.tries) for n in range(len(hosts))]
    header = ["ranks", "on hosts", "on this one"]
    print_table("Seconds to a lab that is ready, medians", header, starts)
    with Lab(launcher="ssh", hosts=args.hosts) as lab:
        lab.run(LOOK)
        memory = lab.pull("pss", "all")
        rows = [
            traffic_row("by hand", lab, args.epochs, BY_HAND, lab.run),
            traffic_row(
                "prepared",
                lab,
                args.epochs,
                PREPARED,
                lambda code: lab.train("ddp", code, live=False),
            ),
        ]
        print(f"MiB of a host besides its ranks: {max(memory) / 2**20:.0f}")
        print_table("DDP", ["loop", "bytes a step and rank", "steps/s"], rows)


def start_row(hosts: list[str], tries: int) -> list[str]:
    num_ranks = sum(int(each.split(":")[1]) for each in hosts)
    there, here = [], []
    for _ in range(tries):
        there.append(seconds(lambda: Lab(launcher="ssh", hosts=",".join(hosts))))
        here.append(seconds(lambda: Lab(num_ranks=num_ranks, device="cpu")))
    return [str(num_ranks), f"{median(there):.1f}", f"{median(here):.1f}"]


def seconds(start: Callable[[], Lab]) -> float:
    began = time.monotonic()
    with start():
        return time.monotonic() - began


def traffic_row(
    name: str, lab: Lab, epochs: int, wrap: str, run: Callable[[str], object]
) -> list[str]:
    """Of so many epochs, after the first few of a run."""
    found = []
    for num_epochs in (epochs // 4, epochs // 4 + epochs):
        before = traffic(lab)
        began = time.monotonic()
        run(LOOP.format(wrap=wrap, epochs=num_epochs))
        found.append((traffic(lab) - before, time.monotonic() - began))
    (few_bytes, few_s), (more_bytes, more_s) = found
    steps = epochs * STEPS_OF_EPOCH
    each = (more_bytes - few_bytes) / steps / lab.world_size
    return [name, f"{each:,.0f}", f"{steps / (more_s - few_s):,.0f}"]


def traffic(lab: Lab) -> int:
    """Bytes of all hosts so far."""
    lab.run(LOOK)
    hosts = {each.host: each.rank for each in lab.placements}
    return sum(lab.pull("traffic", rank) for rank in hosts.values())


if __name__ == "__main__":
    main()
