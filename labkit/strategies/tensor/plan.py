"""Which layers of a model are split, and how: a plan in words, or in PyTorch's styles.

The words are those of Hugging Face's `tp_plan`, and three for sequences.
"""

import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from labkit.checks import UnsupportedLoopError
from labkit.checks import check_flag
from labkit.checks import short_repr
from labkit.compat.torch import has_gradient_hooks
from labkit.records import shorten

Styles = tuple[ParallelStyle, ...]
"""Applied to one module, one after the other."""

SEQUENCE = Shard(-2)
"""Of (..., T, dim)."""


def whole_output() -> ParallelStyle:
    """The output stays a DTensor, so that the layers that take it add up the gradients
    that they give it before these are all-reduced, once."""
    return PrepareModuleOutput(
        output_layouts=Replicate(),
        desired_output_layouts=Replicate(),
        use_local_output=False,
    )


def gathered_output() -> ParallelStyle:
    """As `whole_output`, of a layer that computes a part of the sequence."""
    return PrepareModuleOutput(
        output_layouts=SEQUENCE,
        desired_output_layouts=Replicate(),
        use_local_output=False,
    )


def gathered_columns() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


WORDS: dict[str, Callable[[], Styles]] = {
    "colwise": lambda: (ColwiseParallel(),),
    "rowwise": lambda: (RowwiseParallel(),),
    "colwise_rep": lambda: (gathered_columns(),),
    "colwise_gather_output": lambda: (gathered_columns(),),
    "colwise_loss": lambda: (ColwiseParallel(use_local_output=False),),
    "rowwise_split_input": lambda: (RowwiseParallel(input_layouts=Replicate()),),
    "embedding_rowwise": lambda: (RowwiseParallel(input_layouts=Replicate()),),
    "embedding_rowwise_sequence": lambda: (
        RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
    ),
    "rowwise_sequence": lambda: (RowwiseParallel(output_layouts=SEQUENCE),),
    "replicated": lambda: (whole_output(),),
    "replicated_with_grad_allreduce": lambda: (
        SequenceParallel(sequence_dim=-2, use_local_output=True),
    ),
    "sequence": lambda: (
        SequenceParallel(sequence_dim=-2, use_local_output=False),
        gathered_output(),
    ),
}
"""What a plan can say of a layer.

`replicated_with_grad_allreduce` is for a norm over each head, as Qwen3 has. It gets a
rank's heads, as it would get its part of a sequence: only the last dimension counts.
"""

OF_EXPERTS = "moe_tp_experts"
"""What a `tp_plan` of transformers says of a layer that has a parameter for the same
matrix of all experts, and the plan names each of these."""

ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid),
)
"""What computes each element by itself, so that a part of them is enough."""


def find_plan(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Styles]:
    """The styles of the layers of `model` that are split, by name.

    Of `config["plan"]`, the model's own `tp_plan` (or, with `config["sequence"]`, its
    `sp_plan`), or for the Linear layers of a Sequential with nothing but elementwise
    functions between them. UnsupportedLoopError where there is none, and ValueError for
    a plan that names no layer, or in other words. Experts that a plan of its own splits
    stay whole: PyTorch splits layers, and these are parameters of one.
    """
    for flag in ("sequence", "loss_parallel"):
        check_flag(f'--config: "{flag}"', config.get(flag, False))
    plan = config.get("plan")
    is_own = plan is None
    if is_own:
        name = "sp_plan" if config.get("sequence") else "tp_plan"
        plan = plan_of(model, name)
        if not plan and not config.get("sequence"):
            plan = dict(pairs(model))
    if not isinstance(plan, Mapping):
        raise ValueError(
            f'--config: "plan" is {short_repr(plan)}; it must be a dict from names of '
            'layers to words, for example {"blocks.*.up": "colwise"}'
        )
    found: dict[str, Styles] = {}
    for pattern, style in plan.items():
        if is_own and (style == OF_EXPERTS or is_of_parameters(model, pattern)):
            continue
        names = [n for n, _ in model.named_modules() if n and fnmatchcase(n, pattern)]
        if not names and is_own and is_of_a_family(model):
            continue
        if not names:
            raise ValueError(
                f"the plan has {short_repr(pattern)}, and no layer of "
                f"{type(model).__name__} is called so; it has "
                f"{shorten(', '.join(n for n, _ in model.named_modules() if n), 120)}"
            )
        if config.get("loss_parallel") and style in WHOLE_LOGITS:
            style = "colwise_loss"
        for name in names:
            found[name] = styles_of(pattern, style)
    if not found:
        sequence = " for sequence parallelism" if config.get("sequence") else ""
        raise UnsupportedLoopError(
            f"{type(model).__name__} has no plan for how to split its layers"
            f"{sequence}: give a plan, options = "
            '{"plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}} in a '
            "notebook cell and --config options on the magic line, or use fsdp"
        )
    return found


def plan_of(model: nn.Module, name: str) -> dict[str, Any]:
    """The plan that a model has under this name, or that of a model within it, as in
    peft's: the one of which most names are there."""
    most: dict[str, list[nn.Module]] = {}
    owner, is_within = model, False
    for prefix, module in model.named_modules():
        plan = getattr(module, name, None)
        found = {
            pattern: layers
            for pattern in (plan if isinstance(plan, Mapping) else {})
            if (layers := layers_called(pattern, module))
        }
        if len(found) > len(most):
            most, owner, is_within = found, module, bool(prefix)
    plan = dict(getattr(owner, name, None) or {})
    if not is_within and not any(map(has_adapter, itertools.chain(*most.values()))):
        return plan
    names = {id(each): n for n, each in model.named_modules()}
    return {
        f"{names[id(layer)]}{part}": word
        for pattern, layers in most.items()
        for layer in layers
        for part, word in of_adapter(layer, plan[pattern])
    }


def layers_called(pattern: str, model: nn.Module) -> list[nn.Module]:
    return [m for n, m in model.named_modules() if n and fnmatchcase(n, pattern)]


def has_adapter(layer: nn.Module) -> bool:
    """Whether it is one of peft's, around a layer and beside it two of low rank."""
    return {"base_layer", "lora_A", "lora_B"} <= dict(layer.named_children()).keys()


def of_adapter(layer: nn.Module, style: Any) -> Iterator[tuple[str, Any]]:
    """What of a layer is split when the plan says so, and how: what LoRA adds to it
    has a part of the outputs, or is given a part of the inputs, too."""
    if not has_adapter(layer):
        yield "", style
        return
    yield ".base_layer", style
    beside = {"colwise": "lora_B", "rowwise": "lora_A"}.get(str(style))
    for name, _ in layer.get_submodule(beside).named_children() if beside else ():
        yield f".{beside}.{name}", style


def is_of_parameters(model: nn.Module, pattern: str) -> bool:
    """Whether a name in a plan is that of parameters, and of no layers."""
    if any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
        return False
    return any(fnmatchcase(name, pattern) for name, _ in model.named_parameters())


def is_of_a_family(model: nn.Module) -> bool:
    """Whether its plan is that of all models of transformers that have such a config:
    it may name layers that only some have, as dense ones beside experts."""
    return bool(getattr(getattr(model, "config", None), "base_model_tp_plan", None))


def experts_left_whole(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """The names in the model's own plan of what `find_plan` leaves whole."""
    if config.get("plan") is not None or config.get("sequence"):
        return []
    plan = plan_of(model, "tp_plan")
    return [name for name in plan if is_of_parameters(model, name)]


WHOLE_LOGITS = ("colwise_rep", "colwise_gather_output")


def styles_of(pattern: str, style: Any) -> Styles:
    if isinstance(style, ParallelStyle):
        return (style,)
    if not isinstance(style, str) or style not in WORDS:
        raise ValueError(
            f"the plan has {short_repr(style)} for {short_repr(pattern)}; it must be a "
            f"ParallelStyle of torch.distributed.tensor.parallel, or one of: "
            f"{', '.join(WORDS)}"
        )
    return WORDS[style]()


def pairs(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Linear layers one after the other in a Sequential, the first split by columns and
    the second by rows, so that there is one all-reduce for both."""
    if isinstance(model, nn.Sequential):
        before = None
        for name, child in model.named_children():
            whole = f"{prefix}{name}"
            if isinstance(child, nn.Linear) and is_plain(child):
                if before is None:
                    before = whole
                else:
                    yield before, "colwise"
                    yield whole, "rowwise"
                    before = None
            elif not isinstance(child, ELEMENTWISE):
                before = None
    for name, child in model.named_children():
        yield from pairs(child, f"{prefix}{name}.")


def is_plain(layer: nn.Module) -> bool:
    """Whether its parameters are what it computes with: no weights are made of others,
    as weight_norm does."""
    names = {name for name, _ in layer.named_parameters()}
    return names <= {"weight", "bias"} and "weight" in names


def check_even(model: nn.Module, plan: Mapping[str, Styles], num_parts: int) -> None:
    """UnsupportedLoopError for a layer whose rows or columns, or heads, cannot be cut
    into `num_parts` equal parts."""
    for name, styles in plan.items():
        layer = model.get_submodule(name)
        for style in styles:
            size, what = size_of(layer, style)
            if size % num_parts:
                raise UnsupportedLoopError(
                    f"layer {name} has {size} {what}, which {num_parts} ranks cannot "
                    f"share evenly: choose a multiple of {num_parts}, or another --mesh"
                )
            head_dim = getattr(
                model.get_submodule(name.rpartition(".")[0]), "head_dim", 0
            )
            if what != "columns" or not isinstance(head_dim, int) or not head_dim:
                continue
            num_heads, rest = divmod(size, head_dim)
            if num_heads and not rest and num_heads % num_parts:
                heads = "1 head" if num_heads == 1 else f"{num_heads} heads"
                raise UnsupportedLoopError(
                    f"layer {name} has {heads} of {head_dim}, which "
                    f"{num_parts} ranks cannot share evenly: choose a multiple of "
                    f"{num_parts} heads, or another --mesh"
                )


def split_dim(layer: nn.Module, styles: Styles) -> int | None:
    """The dimension of the layer's weight that is divided; None where it stays whole,
    or a style of the user's own decides."""
    for style in styles:
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            by_columns = isinstance(style, ColwiseParallel)
            return int(by_columns == isinstance(layer, nn.Embedding))
    return None


def size_of(layer: nn.Module, style: ParallelStyle) -> tuple[int, str]:
    """How many of what a style divides among the ranks; none of those that divide no
    parameter. UnsupportedLoopError for a layer that PyTorch cannot split."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return 0, ""
    if not is_plain(layer):
        raise UnsupportedLoopError(
            f"the plan splits a {type(layer).__name__} whose weight is made of others, "
            "for example by weight_norm or spectral_norm; leave it out of the plan: it "
            "is then whole on every rank"
        )
    for name, parameter in layer.named_parameters():
        if has_gradient_hooks(parameter):
            raise UnsupportedLoopError(
                f"{name} of a layer that is split has a hook for its gradient, which "
                "would not be called for its parts. Change parameter.grad between "
                "backward and step instead, which is that of the whole batch"
            )
    by_columns = isinstance(style, ColwiseParallel)
    if isinstance(layer, nn.Linear):
        if by_columns:
            return layer.out_features, "columns"
        return layer.in_features, "rows"
    if isinstance(layer, nn.Embedding):
        if by_columns:
            return layer.embedding_dim, "columns of its table"
        return layer.num_embeddings, "rows of its table"
    raise UnsupportedLoopError(
        f"the plan splits a {type(layer).__name__}, but PyTorch can split only "
        "nn.Linear and nn.Embedding; leave it out of the plan, and it stays whole on "
        "every rank"
    )
