"""ZeRO stage 3: a rank has a part of the parameters, gathered layer by layer."""

import contextlib
import functools
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import ParamSpec
from typing import TypeVar

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.deepspeed import ask_within
from labkit.compat.deepspeed import follow_external
from labkit.compat.deepspeed import map_tensors
from labkit.compat.deepspeed import part_in_fp32
from labkit.compat.deepspeed import unchanged
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_transformed
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.autograd.rewritten import Inputs
from labkit.strategies.model.alike import check_nested
from labkit.strategies.model.gradients import is_absent
from labkit.strategies.model.gradients import is_empty
from labkit.strategies.model.states import plain_shape
from labkit.strategies.model.writes import Writes
from labkit.strategies.model.writes import refuse
from labkit.strategies.prepared import Tensors
from labkit.strategies.prepared import optimizer_tensors
from labkit.strategies.zero.engines import buckets
from labkit.strategies.zero.engines import drop_gathers
from labkit.strategies.zero.engines import flat
from labkit.strategies.zero.engines import land_parameters
from labkit.strategies.zero.engines import plain_copy
from labkit.strategies.zero.partitioned import ZeRO
from labkit.strategies.zero.partitioned import process_filled
from labkit.strategies.zero.partitioned import take
from labkit.strategies.zero.states import Partitions
from labkit.strategies.zero.states import own_part

TRANSFORMED = (
    "torch.func (grad, vjp, jvp, vmap) calls the model, and zero3 gathers its "
    "parameters in such a call, which torch.func cannot transform. If the loop ends in "
    "loss.backward(), use ddp, zero1 or zero2; if torch.func computes the gradients, "
    "use single"
)

P = ParamSpec("P")
R = TypeVar("R")


def plainly(run: Callable[P, R]) -> Callable[P, R]:
    """What DeepSpeed or labkit does in every step, with parameters as plain ones: they
    ask nearly all of the questions that `ShardedParameter` would have to answer."""

    @functools.wraps(run)
    def run_plainly(*args: P.args, **kwargs: P.kwargs) -> R:
        with DisableTorchFunctionSubclass():
            return run(*args, **kwargs)

    return run_plainly


OTHER_CALLS = (
    "ranks have trained through different calls of the model's layers, for example "
    "because each leaves out parts of the loss by its own samples (`if mask.sum() == "
    "0: continue`), and zero3 needs every rank to make the same calls. Give such parts "
    "the weight 0 instead of leaving them out, or decide by the sum over the ranks, "
    "with dist.all_reduce; or use ddp, zero1 or zero2"
)


def in_words(reset_step: Callable[[], None]) -> None:
    """Begin a forward pass; what DeepSpeed then compares of the ranks' last one, as
    long as it records it, may differ."""
    try:
        reset_step()
    except RuntimeError as error:
        if "disagreement" in str(error):
            raise UnsupportedLoopError(OTHER_CALLS) from error
        raise


@contextlib.contextmanager
def trained(parameter: nn.Parameter) -> Iterator[None]:
    """A parameter whose gradient is there, though the loop may have frozen it since:
    DeepSpeed passes over one that is frozen."""
    is_frozen = not parameter.requires_grad
    parameter.requires_grad |= is_frozen
    try:
        yield
    finally:
        parameter.requires_grad &= not is_frozen


class ZeRO3(ZeRO):
    """Parameters are gathered for a layer's forward and backward pass."""

    refuses_writes = True
    _has_said_so = False
    accumulators = plainly(ZeRO.accumulators)
    _check_trained = plainly(ZeRO._check_trained)

    def _lay_out(self) -> None:
        zero = self._zero
        numbers = {id(m): number for number, m in enumerate(self.module.modules())}
        offload = zero.parameter_offload
        asking = [
            (zero, "independent_gradient_partition_epilogue"),
            (zero, "zero_grad"),
            (offload, "pre_sub_module_backward_function"),
            (offload, "post_sub_module_backward_function"),
            (offload, "partition_all_parameters"),
            (offload, "release_backward_leftovers"),
        ]
        for each, name in asking:
            setattr(each, name, plainly(getattr(each, name)))
        ask_within(plainly, zero)
        zero.reduce_ready_partitions_and_remove_grads = plainly(
            partial(process_filled, zero.reduce_ready_partitions_and_remove_grads)
        )
        names = {id(p): name for name, p in self.module.named_parameters()}
        writes = Writes(refuse(self.name))
        calls: set[int] = set()
        offload.pre_sub_module_forward_function = partial(
            begin_watched,
            *(self.route, numbers, calls, writes),
            torch.compiler.disable(writes.begin),
            names,
            offload.pre_sub_module_forward_function,
        )
        offload.post_sub_module_forward_function = partial(
            end_watched,
            *(writes, torch.compiler.disable(writes.end), names),
            offload.post_sub_module_forward_function,
        )
        for module in self.module.modules():
            vars(module)["__deepcopy__"] = partial(plain_copy, module)
            self._undo += watch_inputs(module, calls)
        coordinator = offload.get_param_coordinator()
        coordinator.reset_step = partial(in_words, coordinator.reset_step)
        follow_external(self.module.modules(), coordinator)
        self.see_calls()
        check = self.module.register_forward_pre_hook(
            lambda module, args: check_nested(args, "zero3")
        )
        self._undo.append(check.remove)

    @plainly
    def begin_backward(self, roots: Roots, used: Sequence[nn.Parameter]) -> None:
        super().begin_backward(roots, used)

    def _reduce_gradients(self) -> None:
        self._zero.finalize_gradient_accumulation_boundary()

    def _reset_parameters(self) -> None:
        self._take_weights()
        drop_gathers(self._zero.parameter_offload)

    def _reset_reduction(self) -> None:
        for bucket in self._zero.ipg_buckets.values():
            bucket.clear_params()
        for parameter in self.given_parameters:
            parameter.grad = None  # DeepSpeed's own zero_grad is not for CPUs here

    def _process_gradient(self, parameter: nn.Parameter) -> None:
        self._zero.reduce_ready_partitions_and_remove_grads(parameter)

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have these whole on every rank, and keep them so. Collective."""
        self._recover()
        # DeepSpeed gathers these again after every step, and frees none in between.
        kept = self._zero.persistent_parameters
        known = {id(parameter) for parameter in kept}
        touched: list[Any] = list(parameters)
        kept += [parameter for parameter in touched if id(parameter) not in known]
        for parameter in kept:
            parameter.ds_persist = parameter.is_external_param = True
        if any(parameter.ds_status.name == "INFLIGHT" for parameter in touched):
            self._take_weights()
            land_parameters(self.engine)
        absent = [parameter for parameter in kept if is_absent(parameter)]
        if absent:
            for_any_pass(absent[0].all_gather, absent)
        if not self._has_said_so and self.peers.rank == 0:
            self._has_said_so = True
            print(
                "labkit: the loop uses parameters outside the model's forward pass. "
                "zero3 shards them, so those are gathered now and stay whole on every "
                "rank, which costs memory",
                file=sys.stderr,
            )

    @plainly
    def _whole_parameters(self) -> list[torch.Tensor]:
        kept = self._zero.persistent_parameters
        return [parameter.data for parameter in kept if not is_absent(parameter)]

    @plainly
    @torch.no_grad()
    def _take_weights(self) -> None:
        for parameter in self._zero.persistent_parameters:
            if is_absent(parameter):
                continue
            ours = own_part(parameter.ds_tensor, parameter.data, self.peers.rank)
            parameter.ds_tensor.data.copy_(ours.view_as(parameter.ds_tensor))
            if (second := parameter.ds_secondary_tensor) is not None:
                rank = self.peers.rank % parameter.ds_secondary_tensor_group_size
                second.copy_(own_part(second, parameter.data, rank))
            if id(parameter) in self._trained_ids:
                master = part_in_fp32(self._zero, parameter)
                ours = ours[: master.numel()].view_as(master).to(master.device)
                take(ours, master)

    def _with_nodes(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[nn.Parameter, Any]]:
        # A node of autograd remembers the shape that its parameter has.
        empty: list[Any] = [p for p in parameters if is_empty(p)]
        with self._gradients:
            for parameter in empty:
                blank = torch.empty((), dtype=parameter.dtype, device=parameter.device)
                parameter.data = blank.expand(plain_shape(parameter))
            try:
                return super()._with_nodes(parameters)
            finally:
                for parameter in empty:
                    parameter.data = parameter.data.new_empty(0)

    @contextlib.contextmanager
    def stepping_groups(self) -> Iterator[None]:
        # Where DeepSpeed puts them in a step, a sub-group after the other.
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = [
                partition
                for sub, partition in enumerate(self._zero.fp32_partitioned_groups_flat)
                if self._zero.sub_group_to_group_id[sub] == number
            ]
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _discard(self) -> None:
        # Or a parameter that the next step does not use would have those of this one.
        if self._zero.grad_partitions_flat_buffer is not None:
            self._zero.grad_partitions_flat_buffer.zero_()
        if self._zero.offload_optimizer:
            for master in self._zero.fp32_partitioned_groups_flat:
                if master.grad is not None:
                    master.grad.zero_()

    def _gather_gradient(self, parameter: Any) -> torch.Tensor:
        with trained(parameter):
            whole: torch.Tensor = self._zero.get_fp32_grad_for_param(parameter)
        return whole.clone()  # for it may be a view of what it was gathered in

    def _partition_gradient(self, parameter: Any, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_grad

        part = own_part(parameter.ds_tensor, value, self.peers.rank)
        with trained(parameter):
            safe_set_local_grad(parameter, part)

    def updated(self) -> Iterable[torch.Tensor]:
        partitions: list[torch.Tensor] = self._zero.fp32_partitioned_groups_flat
        return partitions

    def partitions(self) -> Partitions:
        zero = self._zero
        return list(
            zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        )

    def tensors(self) -> dict[str, Tensors]:
        zero = self._zero
        parameters: list[Any] = list(self.module.parameters())
        parts = [(p.ds_tensor, p.ds_secondary_tensor) for p in parameters]
        return {
            "communication_buffers": self.communication_buffers(),
            "parameters": [*flat(parts), *self.module.buffers()],
            "gradients": [
                zero.grad_partitions_flat_buffer,
                *(parameter.grad for parameter in parameters),
            ],
            "optimizer_state": optimizer_tensors(self.optimizer),
            "master_parameters": zero.fp32_partitioned_groups_flat,
        }

    def communication_buffers(self) -> Tensors:
        with DisableTorchFunctionSubclass():  # several questions to each parameter
            gathered = [p.data for p in self.given_parameters if p.numel()]
        return [*gathered, *buckets(self._zero)]


class Apart:
    """Stands for a function of autograd that DeepSpeed puts around each tensor that a
    module is given, or returns, before or after the hooks of the user's own."""

    def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.apply = apply


def watch_inputs(module: Any, calls: set[int]) -> list[Callable[[], None]]:
    """Have a module itself get others in place of the tensors that it is given, as
    DeepSpeed needs it, and hand back what it writes to them. Hooks see the caller's,
    which may be written to later; where the module returns one of them, it is that.

    `calls` has its id where it is called, and not its forward() alone, which has no
    hooks."""
    if "post_bwd_fn" not in vars(module):  # it is within one that is gathered whole
        return []
    given, returned = module.post_bwd_fn, module.pre_bwd_fn
    handed_on: set[int] = set()
    """Ids of the caller's, in what a call returns."""

    @torch.compiler.disable
    def begin(args: Any, kwargs: dict[str, Any]) -> tuple[Inputs | None, Any, Any]:
        if id(module) not in calls:
            return None, args, kwargs
        calls.discard(id(module))
        handed_on.clear()
        if not torch.is_grad_enabled():
            return None, args, kwargs
        inputs = Inputs(given.apply)
        args = map_tensors(inputs.replace, args)
        for name, value in kwargs.items():
            # By keyword DeepSpeed leaves what it has replaced elsewhere.
            kwargs[name] = inputs.replaced(value)
        return inputs, args, kwargs

    @torch.compiler.disable
    def end(inputs: Inputs, args: Any, output: Any) -> Any:
        # As what it returns: before its gradient comes, parameters are gathered.
        inputs.hand_back(f"a {type(module).__name__}", returned.apply)
        for each in args:
            if not isinstance(each, torch.Tensor):
                map_tensors(inputs.own_of, each)  # in dicts, which are the caller's
        handed_on.update(inputs.ids)
        return map_tensors(inputs.own_of, output)

    def wrap(plain: Forward) -> Forward:
        def forward(called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if called is not module:  # but a copy of it
                return plain(called, *args, **kwargs)
            inputs, args, kwargs = begin(args, kwargs)
            output = plain(called, *args, **kwargs)
            return output if inputs is None else end(inputs, args, output)

        return forward

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        found = tensor if id(tensor) in handed_on else returned.apply(tensor)
        return found

    module.post_bwd_fn, module.pre_bwd_fn = Apart(unchanged), Apart(apply)
    return [
        wrap_forward(module, wrap),
        partial(setattr, module, "post_bwd_fn", given),
        partial(setattr, module, "pre_bwd_fn", returned),
    ]


def for_any_pass(gather: Callable[..., None], *args: Any) -> None:
    """Gather parameters that may stay for a later pass: of what is made in inference
    mode they could be part of no backward pass."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            gather(*args)
    else:
        gather(*args)


def begin_watched(
    route: Route,
    numbers: Mapping[int, int],
    calls: set[int],
    writes: Writes,
    begin: Callable[..., None],
    names: Mapping[int, str],
    run: Callable[..., None],
    module: Any,
) -> None:
    """What stage 3 does before a layer runs, which is noted, and may change its
    parameters."""
    if is_transformed():  # a parameter that is gathered there ends the process
        raise UnsupportedLoopError(TRANSFORMED)
    route.add(numbers.get(id(module), -1))
    with DisableTorchFunctionSubclass():
        for_any_pass(run, module)
    calls.add(id(module))
    kind = id(module), module.training, torch.is_grad_enabled()
    if writes.before or kind not in writes.done:
        begin(kind[0], module.training, partial(own_whole, names, module))


def end_watched(
    writes: Writes,
    end: Callable[..., None],
    names: Mapping[int, str],
    run: Callable[..., None],
    module: Any,
) -> None:
    """What stage 3 does after a layer has run: it frees them, changed or not."""
    if writes.before:
        end(id(module), partial(own_whole, names, module))
    with DisableTorchFunctionSubclass():
        run(module)


def own_whole(names: Mapping[int, str], module: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's own parameters as they are gathered for a forward pass, by name."""
    with DisableTorchFunctionSubclass():
        named = module.named_parameters(recurse=False)
        own = [(names.get(id(p)), p.data) for _, p in named]
    return {name: values for name, values in own if name is not None}
