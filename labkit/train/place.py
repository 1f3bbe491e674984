"""The place of this process among those that a launcher has started."""

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from labkit.checkpoint import abandon_saves
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import place_ranks
from labkit.notebook.cluster.placement import too_few
from labkit.rank.group.process_group import RankProcessGroup
from labkit.records import Placement
from labkit.strategies.mesh.device_mesh import forget_groups
from labkit.strategies.zero.engines import destroy_former_engines


def find_place() -> Placement:
    """What RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say (or LOCAL_SIZE, as
    DeepSpeed's launcher has it); a process to which no launcher gave them is alone.

    Device, backend and threads are those that a rank of a lab on this host would have.
    ValueError for variables that cannot be.
    """
    given = {
        name: _number(name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    given["LOCAL_WORLD_SIZE"] = given["LOCAL_WORLD_SIZE"] or _number("LOCAL_SIZE")
    rank, world_size = given["RANK"], given["WORLD_SIZE"]
    if rank is None and world_size is None:
        rank, world_size = 0, 1
        given["LOCAL_RANK"] = given["LOCAL_WORLD_SIZE"] = None
    if rank is None or world_size is None or not rank < world_size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set here: a launcher sets "
            "both, and ranks from 0 on; launch the script with torchrun "
            "--nproc-per-node N, or unset them"
        )
    local_rank = given["LOCAL_RANK"] or 0
    num_local = given["LOCAL_WORLD_SIZE"] or local_rank + 1  # at least
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < num_local:
        raise ValueError(
            f"{too_few(num_gpus, f'{num_local} processes')}; launch with "
            f"--nproc-per-node {num_gpus}, or with CUDA_VISIBLE_DEVICES= set, for the "
            "CPU"
        )
    options = StartOptions(num_ranks=num_local, device="auto" if num_gpus else "cpu")
    place = place_ranks(options, num_gpus=num_gpus)[local_rank]
    return replace(
        place,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=given["LOCAL_WORLD_SIZE"] or 0,
    )


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise ValueError(f"{variable}={text}: it is a whole number, which a launcher sets")


@contextlib.contextmanager
def join(place: Placement) -> Iterator[RankProcessGroup]:
    """The process group of all processes, until the body has ended well. Collective.

    A process that fails leaves as it is: its launcher ends the others.
    """
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # so that no context lands on cuda:0
    torch.set_num_threads(place.num_threads)
    store: dist.TCPStore | None = None
    where = {}
    if "RANK" not in os.environ:
        # No launcher has said where to meet, and there is nobody else.
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        # DeepSpeed reads them.
        where = {
            **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}"},
        }
    os.environ.update(where)
    dist.init_process_group(
        place.backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.group_timeout_s),
        device_id=device if place.backend == "nccl" else None,
    )
    group = RankProcessGroup(place, {})
    group.adopt()
    yield group
    abandon_saves()  # lets go of the store
    forget_groups()
    # DeepSpeed's engines hold the group, whose threads are to end before the process.
    destroy_former_engines()
    gc.collect()
    group.forget()
    dist.destroy_process_group()
    for variable in where:
        del os.environ[variable]
