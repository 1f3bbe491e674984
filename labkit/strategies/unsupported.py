"""What a strategy cannot train, said before anything is changed."""

from torch import nn

from labkit.checks import UnsupportedLoopError


def check_supported(model: nn.Module, strategy: str) -> None:
    """UnsupportedLoopError, with what to write instead, unless `strategy` can train a
    model like this."""
    if strategy in ("single", "ddp"):
        return
    if scalars := scalar_parameters(model):
        raise UnsupportedLoopError(
            f"{scalars[0]} is a parameter without a dimension, which {strategy} cannot "
            "divide among ranks: give it one, as "
            "torch.nn.Parameter(torch.tensor([1.0])), or use ddp"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedLoopError(
                f"{name or 'the model'} is an embedding with sparse=True, whose "
                f"gradients {strategy} cannot divide among ranks: make it without "
                "sparse=True, or use ddp"
            )
    if strategy == "zero3" and "_orig_mod" in dict(model.named_children()):
        raise UnsupportedLoopError(
            "the model comes from torch.compile, and zero3 cannot partition what is "
            "inside of that; give prepare the plain model, and compile the one that it "
            "returns or use --compile"
        )


def scalar_parameters(model: nn.Module) -> list[str]:
    """The names of parameters without a dimension, as CLIP's `logit_scale` is."""
    return [name for name, p in model.named_parameters() if not p.dim()]
