"""ZeRO stages 1 and 2: every rank has all parameters and updates a part of them."""

from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.compat.deepspeed import begin_sums_on_cpu
from labkit.compat.deepspeed import drop_offloaded
from labkit.compat.deepspeed import forget_offloaded
from labkit.compat.deepspeed import release_buckets
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import optimizer_tensors
from labkit.strategies.zero.engines import buckets
from labkit.strategies.zero.engines import flat
from labkit.strategies.zero.partitioned import ZeRO
from labkit.strategies.zero.partitioned import process_filled
from labkit.strategies.zero.partitioned import take


class ZeRO1And2(ZeRO):
    """Stage 2 reduces gradients within the backward pass, stage 1 after it."""

    def _lay_out(self) -> None:
        self._views = [
            (parameter, parameter.data)
            for group in self._zero.bit16_groups
            for parameter in group
        ]
        self._zero.process_gradients = partial(
            process_filled, self._zero.process_gradients
        )
        begin_sums_on_cpu(self._zero)
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(self._zero.bit16_groups)
            for parameter in group
        }
        self._carried: dict[int, list[torch.Tensor]] = {}
        """Gradients that were reduced before another backward pass, by group."""

    def _reduce_gradients(self) -> None:
        zero = self._zero
        zero.set_gradient_accumulation_boundary(True)
        zero.setup_buckets()
        if self.stage == 1:
            zero.reduce_gradients()
        else:
            if any(zero.all_grad_tensors.get(i) is None for i in self._groups()):
                zero.set_gradient_accumulation_boundary(False)
                zero.independent_gradient_partition_epilogue()  # there were none: zeros
            zero.finalize_gradient_accumulation_boundary()
        zero.set_gradient_accumulation_boundary(False)
        if zero.cpu_offload:
            drop_offloaded(zero, self._used)
        for number, carried in self._carried.items():
            for tensor, more in zip(
                zero.averaged_gradients[number], carried, strict=True
            ):
                tensor.add_(more)
        self._carried.clear()

    def _reset_reduction(self) -> None:
        zero = self._zero
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        release_buckets(zero)

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        self._zero.process_gradients(parameter, self._group_of[id(parameter)])

    def _groups(self) -> range:
        return range(len(self._zero.bit16_groups))

    def _carry(self) -> None:
        super()._carry()
        for number in self._groups():
            self._carried[number] = self._zero.averaged_gradients[number]
            self._zero.averaged_gradients[number] = None

    def _discard(self) -> None:
        self._carried.clear()
        for number in self._groups():
            self._zero.averaged_gradients[number] = None
            self._zero.all_grad_tensors[number] = None
        forget_offloaded(self._zero)

    def _gather_gradient(self, parameter: Any) -> torch.Tensor:
        whole: torch.Tensor = parameter.get_full_hp_grad()
        return whole.to(parameter.dtype) if self.dtype == torch.float32 else whole

    def _partition_gradient(self, parameter: Any, value: torch.Tensor) -> None:
        parameter.set_full_hp_grad(value)

    @torch.no_grad()
    def _take_weights(self) -> None:
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():  # it was given another tensor
                view.copy_(parameter.data)
                parameter.data = view
        for parts, master in zip(
            self._zero.parallel_partitioned_bit16_groups,
            self._zero.single_partition_of_fp32_groups,
            strict=True,
        ):
            take(parts[self.peers.rank], master.data)

    def tensors(self) -> dict[str, Tensors]:
        zero = self._zero
        masters = zero.single_partition_of_fp32_groups
        parameters = list(self.module.parameters())
        # In another precision than the parameters' it adds them up in `grad_accum`.
        added_up = [getattr(each, "grad_accum", None) for each in parameters]
        gradients = [*(each.grad for each in parameters), *added_up]
        whole = [each for each in gradients if has_own_storage(each)]
        partition = [
            *flat(zero.averaged_gradients.values()),
            *flat(zero.all_grad_tensors.values()),
            *flat(master.grad for master in masters),
        ]
        is_whole = self.stage == 1 and whole
        return {
            # First, for a gradient may be a view of a bucket.
            "communication_buffers": self.communication_buffers(),
            "parameters": [*parameters, *self.module.buffers()],
            "gradients": whole if is_whole else [*partition, *whole],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": masters,
        }

    def communication_buffers(self) -> Tensors:
        return buckets(self._zero)


def has_own_storage(gradient: torch.Tensor | None) -> bool:
    """Whether this is a gradient that is no view of a bucket or a partition."""
    return (
        gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes
    )
