"""Monarch: an actor on each rank that runs code, as it has no magics."""

from peers import cells
from peers.session import Notebook

START = """
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env

class Ranks(Actor):
    def __init__(self):
        self.names = {{"rank": current_rank().rank}}

    @endpoint
    def run(self, code):
        exec(code, self.names)

    @endpoint
    def put(self, name, value):
        self.names[name] = value

    @endpoint
    def take(self, name):
        return self.names[name]

mesh = this_host().spawn_procs({{"ranks": {num_ranks}}})
setup_torch_elastic_env(mesh)
ranks = mesh.spawn("ranks", Ranks)
"""


class Monarch(Notebook):
    """As its guide has it."""

    name = "monarch"
    package = "torchmonarch"
    pushing = 'await ranks.put.call("data", data);'
    pulling = 'data = await ranks.slice(ranks=0).take.call_one("data")'

    def opening(self) -> list[str]:
        start = START.format(num_ranks=self.num_ranks)
        return [start, self.cell(cells.join())]

    def cell(self, code: str) -> str:
        return f"await ranks.run.call({code!r});"
