"""What a strategy cannot train, said before anything is changed."""

import re

import torch
from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.c10d import local_part
from labkit.compat.torch import DisableTorchFunctionSubclass
from labkit.compat.torch import is_compiled
from labkit.compat.torch import storage_key
from labkit.strategies import Strategy
from labkit.strategies.model.states import plain_shape
from labkit.strategies.prepared import units


def check_supported(
    model: nn.Module,
    strategy: Strategy,
    *,
    num_ranks: int = 1,
    precision: str = "fp32",
    has_replicas: bool = False,
) -> None:
    """UnsupportedLoopError, with what to write instead, unless `strategy` can train a
    model like this; `has_replicas` where its mesh has an axis of data parallelism."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedLoopError(
            "the model comes from torch.jit.script or torch.jit.trace, whose modules "
            "take no hooks of Python's; give prepare the plain model, and script or "
            "trace what is trained"
        )
    if num_ranks > 1:
        check_embeddings(model, strategy.name)
    if strategy.is_partitioned or strategy.server is not None:
        check_memory(model, strategy.name)
    if not strategy.is_partitioned:
        return
    if not strategy.has_whole_parameters:
        check_complex(model, strategy, precision)
        check_dtypes(model, strategy)
    # A mesh of `tp` alone keeps whole what it does not split.
    keeps_whole = strategy.axes == ("tp",) and not has_replicas
    takes_scalars = strategy.has_whole_parameters or keeps_whole
    if not takes_scalars and (scalars := scalar_parameters(model)):
        written = as_written(f"model.{scalars[0]}")
        raise UnsupportedLoopError(
            f"{scalars[0]} is a parameter without a dimension, which "
            f"{strategy.name} cannot divide among ranks: give it one before the "
            f"optimizer is made, for example by {written} = "
            f"torch.nn.Parameter({written}.detach().reshape(1)), or use ddp"
        )
    if not strategy.has_whole_parameters:
        check_sizes(model, strategy)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedLoopError(
                f"{name or 'the model'} is an embedding with sparse=True, whose "
                f"gradients {strategy.name} cannot divide among ranks: make it without "
                "sparse=True, or use ddp"
            )
    if not strategy.takes_compiled and is_compiled(model):
        later = ", and compile the one that it returns or use --compile"
        raise UnsupportedLoopError(
            f"the model comes from torch.compile, and {strategy.name} cannot partition "
            "what is inside of that; give prepare the plain model"
            f"{'' if 'pp' in strategy.axes else later}"
        )
    if strategy.variant.get("stage") == 3:
        check_compiled_parts(model, strategy.name)


def scalar_parameters(model: nn.Module) -> list[str]:
    """The names of parameters without a dimension, as CLIP's `logit_scale` is."""
    return [name for name, p in model.named_parameters() if not p.dim()]


def check_compiled_parts(model: nn.Module, strategy: str) -> None:
    """UnsupportedLoopError for a part in the place of which there is another module:
    DeepSpeed looks for parameters in each."""
    for name, module in model.named_modules():
        if is_compiled(module):
            written = as_written(f"model.{name}")
            raise UnsupportedLoopError(
                f"{name} comes from torch.compile(...), and {strategy} cannot "
                "partition what is inside of that; compile it in its place, with "
                f"{written}.compile(), leave that to --compile, or use fsdp or zero2"
            )


def as_written(name: str) -> str:
    """A dotted name as Python has it: `model[0].scale`, for the model's `0.scale`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name)


def check_sizes(model: nn.Module, strategy: Strategy) -> None:
    """UnsupportedLoopError for a parameter without elements, which is left over where
    a gradient is reduced, and where DeepSpeed gathers parameters."""
    stage = strategy.variant.get("stage")
    if stage == 1:  # the gradients of all parameters are reduced as one
        return
    for name, parameter in model.named_parameters():
        shape = tuple(plain_shape(parameter))
        if 0 in shape and (stage == 3 or parameter.requires_grad):
            freeze = "" if stage == 3 else "call requires_grad_(False) on it, or "
            raise UnsupportedLoopError(
                f"{name} is a parameter without elements, of shape {shape}, which "
                f"{strategy.name} cannot divide among ranks: {freeze}leave it out of "
                "the model, or use ddp or zero1"
            )


def check_embeddings(model: nn.Module, strategy: str) -> None:
    """UnsupportedLoopError for an embedding that changes its own rows in forward."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        ):
            raise UnsupportedLoopError(
                f"{name or 'the model'} is an embedding with max_norm="
                f"{module.max_norm}, which renormalizes rows in forward: under "
                f"{strategy} each rank would renormalize only those of its own "
                "samples. Make it without max_norm, and renormalize the rows after "
                "optimizer.step(), under torch.no_grad(); or use single"
            )


def check_memory(model: nn.Module, strategy: str) -> None:
    """UnsupportedLoopError for two parameters that have elements in common, of which
    each would get memory of its own. One that is in two places is no two."""
    if pair := in_same_memory(model):
        raise UnsupportedLoopError(
            f"{pair[0]} and {pair[1]} are two parameters in the same memory, for "
            "example after decoder.weight.data = encoder.weight.data.t(): under "
            f"{strategy} each would get memory of its own, and be trained by itself. "
            "Have one parameter in both places, for example by decoder.weight = "
            "encoder.weight, or in forward by torch.nn.functional.linear(x, "
            "self.encoder.weight.t()); or use ddp"
        )


def in_same_memory(model: nn.Module) -> list[str]:
    """The names of two parameters that have elements in common; none where none have.
    Those of an LSTM on a GPU are in one storage, one after the other."""
    by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    with DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            tensor = local_part(parameter).detach()
            if tensor.layout is torch.strided and tensor.numel():
                key = storage_key(tensor.untyped_storage())
                by_storage.setdefault(key, []).append((*extent(tensor), name, tensor))
    for held in by_storage.values():
        near: list[tuple[int, int, str, torch.Tensor]] = []
        for begin, end, name, tensor in sorted(held, key=lambda each: each[0]):
            near = [each for each in near if each[1] > begin]
            for *_, other_name, other in near:
                if have_common_elements(other, tensor):
                    return [other_name, name]
            near.append((begin, end, name, tensor))
    return []


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a tensor's elements begin, and end."""
    begin = int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + sum((size - 1) * stride for size, stride in pairs) + 1


def have_common_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one storage have: they may be columns of one matrix."""
    if one.dtype is not other.dtype:
        return True
    marks = torch.zeros(max(extent(one)[1], extent(other)[1]), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    there = marks.as_strided(other.shape, other.stride(), other.storage_offset())
    return bool(there.any())


def check_dtypes(model: nn.Module, strategy: Strategy) -> None:
    """UnsupportedLoopError for float64 parameters, whose updates DeepSpeed computes in
    float32, and for several dtypes in what fully_shard gathers together."""
    trained = {
        id(each): (name, each.dtype)
        for name, each in model.named_parameters()
        if each.requires_grad and each.is_floating_point()
    }
    doubles = [name for name, dtype in trained.values() if dtype is torch.float64]
    if doubles and strategy.has_own_gradients:
        raise UnsupportedLoopError(
            f"{doubles[0]} is float64, and {strategy.name} updates parameters in "
            "float32: make the model float32 with model.float(), or use ddp, fsdp or "
            "hsdp"
        )
    if strategy.has_own_gradients:
        return
    together = [list(unit.parameters()) for unit in units(model)]
    inside = {id(each) for group in together for each in group}
    together.append([each for each in model.parameters() if id(each) not in inside])
    for tensors in together:
        there = [trained[id(each)] for each in tensors if id(each) in trained]
        found = {str(dtype): name for name, dtype in there}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise UnsupportedLoopError(
                f"{first} is {one} and {second} is {other}, and {strategy.name} "
                "gathers them together: give the parameters of a block one dtype, or "
                "use ddp"
            )


def check_complex(model: nn.Module, strategy: Strategy, precision: str) -> None:
    """UnsupportedLoopError for complex parameters, of which DeepSpeed makes real ones,
    and which have no bf16 or fp16."""
    is_whole = strategy.takes_complex and precision == "fp32"
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and not is_whole:
            raise UnsupportedLoopError(
                f"{name} is a complex parameter, which {strategy.name} does not take"
                + (
                    f" in {precision}; leave out --precision, or use ddp"
                    if strategy.takes_complex
                    else "; keep its real and imaginary parts in a real one, with "
                    "torch.view_as_real, and use torch.view_as_complex in forward, or "
                    "use ddp, fsdp or hsdp"
                )
            )
