"""The greatest gradients alone are sent, the others kept for a later step."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.strategies.communication.hook import Future
from labkit.strategies.communication.hook import Hook
from labkit.strategies.communication.residuals import Residuals
from labkit.strategies.communication.residuals import ids_of
from labkit.strategies.mesh.peers import Peers
from labkit.theory import num_sent_of

DEFAULT = 0.01


class TopK(Hook):
    """Send of each parameter the share `topk` of its gradient that is greatest.

    Per bucket: (1) add what was not sent before; (2) find the greatest of every
    parameter, and keep the rest; (3) all-gather values and places, 4 bytes each;
    (4) add up what the ranks have sent, and divide by their number.

    The greatest are found by parameter, so that the result is the same whatever buckets
    there are. They are added in the order of ranks: equal on all of them.

    Source: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Lin et al., "Deep
    Gradient Compression", ICLR 2018.
    """

    takes = ("topk",)

    def __init__(self, method: str, peers: Peers, config: Mapping[str, Any]) -> None:
        super().__init__(method, peers, config)
        self.share = config.get("topk", DEFAULT)
        if not (is_number(self.share) and 0 < self.share <= 1):
            raise ValueError(
                f'--config: "topk" is {short_repr(self.share)}; it is the share of '
                "each gradient that is sent, above 0 and at most 1, for example 0.01"
            )
        self.residuals: Residuals = Residuals()
        self.settings = {"topk": float(self.share)}

    @property
    def note(self) -> str:
        return (
            f"--comm topk: a rank sends {100 * self.share:g}% of each gradient, the "
            "largest entries, and adds the rest to its next one, so weights differ "
            'from those of one process. options = {"topk": 0.1} in a notebook cell and '
            "--config options send 10%"
        )

    def send(self, state: Any, bucket: dist.GradBucket) -> Future:
        buffer, ids = bucket.buffer(), ids_of(bucket)
        if (before := self.residuals.of(bucket)) is not None:
            buffer.add_(before)
        places = self._greatest(bucket)
        values = buffer[places].float()
        left = buffer.clone()
        left[places] -= values.to(buffer.dtype)
        sent = torch.cat([values.view(torch.int32), places.int()])
        size = self.peers.size
        received = list(sent.new_empty(size, len(sent)))
        work: Any = dist.all_gather(
            received, sent, group=self.peers.group, async_op=True
        )

        def add_up(future: Any) -> torch.Tensor:
            buffer.zero_()
            for part in received:
                theirs, where = part.chunk(2)
                mean = theirs.view(torch.float32).to(buffer.dtype) / size
                buffer.index_add_(0, where.long(), mean)
            self.residuals.put(ids, left)
            return buffer

        return work.get_future().then(add_up)

    def _greatest(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The places in the bucket of what is sent."""
        found, first = [], 0
        for parameter in bucket.parameters():
            size = parameter.numel()
            of_parameter = bucket.buffer()[first : first + size].abs()
            k = num_sent_of(size, self.share)
            found.append(first + of_parameter.topk(k, sorted=False).indices)
            first += size
        return torch.cat(found)
