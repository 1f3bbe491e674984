"""The states of a model under DeepSpeed's ZeRO: gathered and scattered by parameter.

DeepSpeed lays the trainable parameters of a group end to end, and cuts that into flat
partitions in fp32, one a rank; the optimizer's states are of their shape. No collective
is taken of more than one parameter at a time, and a rank keeps but its share.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from labkit.compat.deepspeed import link_states
from labkit.compat.deepspeed import update_working_parameters
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model import states
from labkit.strategies.model.states import Named
from labkit.strategies.model.states import Source
from labkit.strategies.model.states import plain_shape

Partitions = list[tuple[torch.Tensor, list[nn.Parameter]]]
"""This rank's flat partition of a group of parameters, and those parameters."""


class ZeROStates:
    """The states of `module`, which DeepSpeed's optimizer `zero` updates."""

    def __init__(
        self, module: nn.Module, zero: Any, partitions: Partitions, peers: Peers
    ) -> None:
        self._peers = peers
        self._module = module
        self._zero = zero
        self._partitions = partitions
        self._flat_of = {id(p): flat for flat, group in partitions for p in group}
        link_states(zero)

    def gather(self, *, with_optimizer: bool) -> Named:
        """This rank's share of the states, each whole, on the CPU. Collective."""
        share = CheckpointShare(self._peers)
        for name, tensor in states.model_tensors(self._module).items():
            whole = self._whole(tensor)
            share.offer(name, whole)
            flat = self._flat_of.get(id(tensor))
            if flat is None or not with_optimizer:
                continue
            name = name.removeprefix("model.")
            for key, value in self._zero.optimizer.state.get(flat, {}).items():
                if is_like(value, flat):
                    share.offer(f"optimizer.{name}.{key}", full_state(tensor, key))
                elif value is not None:
                    share.offer(
                        f"optimizer.{name}.{key}",
                        states.as_tensor(value, f"optimizer.{name}.{key}"),
                    )
        return share.kept

    def check(self, source: Source, *, with_optimizer: bool) -> None:
        """ValueError unless the checkpoint has exactly what `restore` sets."""
        model = {
            name: torch.empty(plain_shape(tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in states.model_tensors(self._module).items()
        }
        source.check(model)
        states.check_all_taken(source, "model", model)
        if with_optimizer:
            taken = {
                f"optimizer.{name}.{key}": tensor
                for name, tensor in self._trained()
                for key in states.saved_keys(source, name)
            }
            states.check_all_taken(source, "optimizer", taken)
            for name, tensor in taken.items():
                shape, dtype = source.tensors[name]
                if shape and shape != plain_shape(tensor):
                    whole = torch.empty(plain_shape(tensor), dtype=dtype, device="meta")
                    source.check({name: whole})

    def restore(self, source: Source, *, with_optimizer: bool) -> None:
        """Set all states to those of a checkpoint. Collective."""
        for name, tensor in states.model_tensors(self._module).items():
            if id(tensor) not in self._flat_of:
                self._fill_plain(source, name, tensor)
                continue
            whole = torch.empty(plain_shape(tensor), dtype=torch.float32)
            source.fill({name: whole})
            self._set_full(tensor, whole, None)
        if with_optimizer:
            self.restore_optimizer(source)
        update_working_parameters(self._zero)

    def restore_optimizer(self, source: Source) -> None:
        """Set the optimizer's states alone. Collective."""
        self._make_states(source)
        for name, tensor in self._trained():
            flat = self._flat_of[id(tensor)]
            for key, value in self._zero.optimizer.state[flat].items():
                named = f"optimizer.{name}.{key}"
                # Of a parameter that has had no gradient yet there is none.
                if is_like(value, flat) and named in source.tensors:
                    whole = torch.empty(plain_shape(tensor), dtype=torch.float32)
                    source.fill({named: whole})
                    self._set_full(tensor, whole, key)

    def _trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that are partitioned, by name."""
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self._flat_of:
                yield name, parameter

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if id(tensor) in self._flat_of:
            whole: torch.Tensor = safe_get_full_fp32_param(tensor)
            return whole
        if hasattr(tensor, "ds_id"):  # frozen, and in parts all the same
            with GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor

    def _fill_plain(self, source: Source, name: str, tensor: torch.Tensor) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        if not hasattr(tensor, "ds_id"):
            source.fill({name: tensor})
            return
        with GatheredParameters([tensor], modifier_rank=0):
            source.fill({name: tensor.data})

    def _set_full(self, parameter: Any, whole: torch.Tensor, key: str | None) -> None:
        """Set this rank's part of a parameter's fp32 values, or of its state `key`."""
        from deepspeed import utils

        if not hasattr(parameter, "ds_id"):
            if key is None:
                utils.safe_set_full_fp32_param(parameter, whole)
            else:
                utils.safe_set_full_optimizer_state(parameter, whole, key)
            return
        part = own_part(parameter.ds_tensor, whole, self._peers.rank)
        if key is None:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, key)

    def _make_states(self, source: Source) -> None:
        """Give the partitions the states that the checkpoint has, empty as yet."""
        names = {id(parameter): name for name, parameter in self._trained()}
        optimizer = self._zero.optimizer
        for flat, parameters in self._partitions:
            state: dict[str, torch.Tensor] = {}
            device = flat.device if counts_on_device(optimizer) else "cpu"
            for parameter in parameters:
                name = names[id(parameter)]
                for key in states.saved_keys(source, name):
                    shape, dtype = source.tensors[f"optimizer.{name}.{key}"]
                    if shape == plain_shape(parameter) and shape:
                        state.setdefault(key, torch.zeros_like(flat))
                        continue
                    # One count for the whole partition, that of the furthest.
                    count = torch.empty(shape, dtype=dtype, device=device)
                    source.fill({f"optimizer.{name}.{key}": count})
                    state[key] = torch.maximum(state.get(key, count), count)
            optimizer.state[flat] = state
        link_states(self._zero)


class CheckpointShare:
    """One rank's share of tensors that all ranks are given: each goes to the rank that
    has least."""

    def __init__(self, peers: Peers) -> None:
        self.kept: Named = {}
        self._rank = peers.rank
        self._bytes = [0] * peers.size

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """Keep it, on the CPU, if it is this rank's."""
        rank = self._bytes.index(min(self._bytes))
        self._bytes[rank] += tensor.nbytes + 1
        if rank == self._rank:
            self.kept[name] = tensor.detach().cpu()


def is_like(value: Any, flat: torch.Tensor) -> bool:
    """Whether this state has an element for every one of a partition."""
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def full_state(parameter: torch.Tensor, key: str) -> torch.Tensor:
    """One state of a parameter, whole. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    whole: torch.Tensor = safe_get_full_optimizer_state(parameter, key)
    return whole


def counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it expects the number of steps where its parameters are."""
    groups = optimizer.param_groups
    return any(each.get("capturable") or each.get("fused") for each in groups)


def own_part(part: torch.Tensor, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What `rank` has of a tensor that stage 3 partitions like `part`; to be read.

    By parts, for DeepSpeed's own safe_set_full_* have no room for an uneven last one.
    """
    size = part.numel()
    mine = whole.flatten()[size * rank : size * (rank + 1)]
    if mine.numel() == size:
        return mine
    own = torch.zeros(size, dtype=whole.dtype, device=whole.device)
    own[: mine.numel()] = mine
    return own
