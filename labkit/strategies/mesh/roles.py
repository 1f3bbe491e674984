"""Which ranks train and which serve them, where a strategy has both."""

from dataclasses import dataclass

from labkit.strategies.mesh.channel import Channel
from labkit.strategies.mesh.peers import Peers

END = "end"
"""What a worker tells every server when its cell has ended."""


@dataclass
class Roles:
    """The ranks of a run with servers, as all of them know them."""

    workers: range
    """They run the cell; to it they are the whole world."""
    servers: range
    """The last ranks."""
    channel: Channel
    num_models: int = 0
    """That this rank has prepared."""

    @property
    def peers(self) -> Peers:
        """The workers, which share the samples of a batch. They have no mesh: meshes
        are kept, and more of them on some ranks would be made again at other times."""
        return Peers(self.channel.rank, len(self.workers), self.channel.device)

    def dismiss_servers(self) -> None:
        """Tell the servers that this worker's cell has ended."""
        for server in self.servers:
            self.channel.tell(server, {"kind": END})
        self.channel.flush()
