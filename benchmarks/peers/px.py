"""Bare ipyparallel: `%%px`, with a process group that a cell forms."""

import time

from peers import cells
from peers.session import Notebook

START = """
import logging
import ipyparallel
cluster = ipyparallel.Cluster(n={num_ranks}, log_level=logging.ERROR)
client = cluster.start_and_connect_sync(activate=True)
client[:].scatter("rank", client.ids, flatten=True).get()
"""


class IPyParallel(Notebook):
    """As its documentation has it, and the group as a script forms it."""

    name = "ipyparallel"
    package = "ipyparallel"
    pushing = 'client[:].push({"data": data}, block=True);'
    pulling = 'data = client[0].pull("data", block=True)'
    closing = "client.close()\ncluster.stop_cluster_sync()"

    def opening(self) -> list[str]:
        store = self.folder / f"store-{time.time_ns()}"  # a former group's is of no use
        how = f"init_method='file://{store}', rank=rank, world_size="
        join = cells.join(how + str(self.num_ranks))
        return [START.format(num_ranks=self.num_ranks), self.cell(join)]

    def cell(self, code: str) -> str:
        return f"%%px --no-stream\n{code}"
