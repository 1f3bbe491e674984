"""What a strategy cannot train, said before anything is changed."""

from torch import nn

from labkit.checks import UnsupportedLoopError
from labkit.compat.torch import is_compiled
from labkit.strategies import Strategy


def check_supported(
    model: nn.Module,
    strategy: Strategy,
    *,
    num_ranks: int = 1,
    precision: str = "fp32",
) -> None:
    """UnsupportedLoopError, with what to write instead, unless `strategy` can train a
    model like this."""
    if num_ranks > 1:
        check_embeddings(model, strategy.name)
    if not strategy.is_partitioned:
        return
    check_complex(model, strategy, precision)
    if scalars := scalar_parameters(model):
        raise UnsupportedLoopError(
            f"{scalars[0]} is a parameter without a dimension, which "
            f"{strategy.name} cannot divide among ranks: give it one, as "
            "torch.nn.Parameter(torch.tensor([1.0])), or use ddp"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedLoopError(
                f"{name or 'the model'} is an embedding with sparse=True, whose "
                f"gradients {strategy.name} cannot divide among ranks: make it without "
                "sparse=True, or use ddp"
            )
    if not strategy.takes_compiled and is_compiled(model):
        raise UnsupportedLoopError(
            f"the model comes from torch.compile, and {strategy.name} cannot partition "
            "what is inside of that; give prepare the plain model, and compile the one "
            "that it returns or use --compile"
        )


def scalar_parameters(model: nn.Module) -> list[str]:
    """The names of parameters without a dimension, as CLIP's `logit_scale` is."""
    return [name for name, p in model.named_parameters() if not p.dim()]


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
