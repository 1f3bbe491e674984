"""What the operators of collectives are called, and what a rank sends for each."""

from typing import Any

import torch
import torch.distributed as dist

from labkit.compat.c10d import group_named

# What kind of collective an operator is, and which of its arguments is the whole
# tensor, or this rank's part of it. With `_c10d_functional` the group is a name.
WHOLE = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "c10d::barrier": ("barrier", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
}
PART = {
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0),
}
KINDS = WHOLE | PART
BETWEEN_TWO = {"send", "recv"}
"""Not to be waited for where they begin: the other rank's may come after them."""


def group_size(args: Any) -> int:
    """The ranks of the group that a collective's arguments name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg).size()
            except RuntimeError:  # a reduce operation, for one
                continue
    name: Any = [arg for arg in args if isinstance(arg, str)][-1]
    return group_named(name).size()


def bytes_on_the_wire(kind: str, payload: int, num_ranks: int) -> int:
    """What a rank sends for a collective over a whole tensor of `payload` bytes.

    A ring sends 1/N of it N-1 times to gather or to reduce and scatter, and does both
    to all-reduce. In an all-to-all a rank keeps 1/N of what it has and sends the rest.
    A broadcast or a reduce is the whole sent by all ranks but one, a gather is a part
    from each of them, a scatter a part to each of them: here the mean of the ranks.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009;
    the bus bandwidth of nccl-tests.
    """
    if kind in BETWEEN_TWO:
        return payload if kind == "send" else 0
    share = payload * (num_ranks - 1) // num_ranks
    if kind in ("gather", "scatter"):
        return share // num_ranks
    return 2 * share if kind == "all_reduce" else share
