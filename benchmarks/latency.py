"""How long a record takes from `log()` on a rank to the front end, in a picture.

Ranks log the time at every step, a hundred a second. Each picture is sent with what the
newest record of each rank in it says; a record has arrived with the first picture that
holds it. What a browser then takes to show a PNG is not in it.
"""

import time

import numpy as np
from _kernel import Kernel
from _kernel import lab_kernel
from _measure import parser
from _measure import print_table
from _measure import spread

CELL = """%%dist_train raw
import time
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
for step in range({num_steps}):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    log(sent_at=time.time())
    time.sleep(0.01)
"""

# What the newest records in each picture say, as the picture leaves the kernel.
NOTE = """
from labkit.notebook.live.live_view import LiveView
pictures, show = [], LiveView._show
def noted(view, bundle):
    found = [view.run.collector.series(r, "sent_at") for r in view.run.collector.ranks]
    show(view, bundle)
    pictures.append([float(f["value"][-1]) if len(f) else 0.0 for f in found])
LiveView._show = noted
"""


def main() -> None:
    args = parser(__doc__, seconds=20, ranks=2).parse_args()
    with lab_kernel(f"%dist_start -n {args.ranks} --device cpu") as kernel:
        found = latencies(kernel, args.ranks, args.seconds)
    print_table(
        f"Seconds from log() to the front end, {args.seconds} s",
        ["rank", "records", "median", "95%", "worst"],
        [[str(rank), str(len(each)), *spread(each)] for rank, each in enumerate(found)],
    )


def latencies(kernel: Kernel, num_ranks: int, seconds: int) -> list[list[float]]:
    """Of every record of each rank that a picture had, while the run went on."""
    kernel.run(NOTE)
    request = kernel.begin(CELL.format(num_steps=100 * seconds))
    arrivals = []
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if "image/png" in content.get("data", {}):
            arrivals.append(time.time())
        if content.get("execution_state") == "idle":
            break
    newest = np.array(kernel.value("pictures"))
    history = "labkit.current_lab().runs[-1].history"
    kernel.run("import labkit")
    # The last picture is drawn when the run is over, and holds all.
    return [
        of_rank(
            kernel.value(f"{history}.query('rank == {rank}')['sent_at'].tolist()"),
            newest[:-1, rank],
            np.array(arrivals[:-1]),
        )
        for rank in range(num_ranks)
    ]


def of_rank(sent: list[float], newest: np.ndarray, arrivals: np.ndarray) -> list[float]:
    """`newest` and `arrivals`: (num_pictures,)."""
    times = np.array(sent)
    first = np.searchsorted(newest, times)  # the first picture that holds the record
    is_shown = first < len(newest)
    return (arrivals[first[is_shown]] - times[is_shown]).tolist()


if __name__ == "__main__":
    main()
