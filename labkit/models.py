"""Small models for the notebooks and the tests."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


def mlp(num_inputs: int = 64, num_hidden: int = 64, num_classes: int = 10) -> nn.Module:
    """Build a perceptron with one hidden layer; its defaults fit `labkit.data.digits`.

    Parameters
    ----------
    num_inputs : int, default 64
        Values of a sample, whatever its shape.
    num_hidden : int, default 64
        Units of the hidden layer.
    num_classes : int, default 10
        Logits of a sample.

    Returns
    -------
    nn.Module
        Takes float (N, ...), gives logits (N, num_classes).
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, to whose output the input is added.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

    Parameters
    ----------
    fan_in, fan_out : int
        Channels of the input and of the output.
    stride : int, default 1
        Of the first convolution; with 2 height and width are halved.
    """

    def __init__(self, fan_in: int, fan_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride, bias=False),
                nn.BatchNorm2d(fan_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A small residual network: (N, channels, height, width) to (N, num_classes).

    Three stages of `width`, 2 and 4 times `width` channels.

    Parameters
    ----------
    channels : int, default 1
        Of the images.
    num_classes : int, default 10
        Logits of an image.
    width : int, default 16
        Channels of the first stage.
    blocks : int, default 1
        Residual blocks of a stage.

    Raises
    ------
    ValueError
        For a `width` below 8.
    """

    def __init__(
        self,
        channels: int = 1,
        num_classes: int = 10,
        *,
        width: int = 16,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        if width < 8:
            # uxlfoundation/oneDNN#6035
            raise ValueError(
                f"width is {width}; it must be 8 or more: oneDNN, which computes on "
                "the CPU, corrupts memory in the backward pass of a strided 1x1 "
                "convolution of fewer channels"
            )
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        fan_in = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                fan_out = width * 2**stage
                stages.append(ResidualBlock(fan_in, fan_out, stride))
                fan_in = fan_out
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(fan_in, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.head(x.mean(dim=(2, 3)))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP, each added to its input.

    Takes and gives (N, T, dim). The attention is causal; see
    `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    dim : int
        Width of the residual stream.
    num_heads : int
        Heads of the attention, a divisor of `dim`.

    Raises
    ------
    ValueError
        For a `dim` that `num_heads` does not divide.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(
                f"num_heads is {num_heads}; choose a divisor of dim, which is {dim}"
            )
        self.head_dim = dim // num_heads
        self.norm1 = nn.LayerNorm(dim)
        # Not one layer that is cut in three: to split its columns among ranks would mix
        # queries, keys and values, without an error.
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def reset_parameters(self) -> None:
        """Give its layers the values that GPT does; for models on the meta device."""
        for layer in (self.q, self.k, self.v, self.out, self.up, self.down):
            initialize(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            # As many heads as are here: (N, T, dim) to (N, heads, T, head_dim).
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer: token ids (N, T) to logits (N, T, vocab_size).

    The output layer's weight is the token embedding's (tied).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners".

    Parameters
    ----------
    vocab_size : int, default 256
        Tokens that there are; the default is for bytes, as of `labkit.data.text`.
    context : int, default 128
        The greatest T.
    dim : int, default 128
        Width of the residual stream.
    num_heads : int, default 4
        Heads of each attention, a divisor of `dim`.
    num_layers : int, default 4
        Transformer blocks.

    Examples
    --------
    The size of GPT-2, on the meta device, which has shapes and no values:

    >>> import torch
    >>> with torch.device("meta"):
    ...     gpt2 = GPT(50257, context=1024, dim=768, num_heads=12, num_layers=12)
    >>> sum(parameter.numel() for parameter in gpt2.parameters())
    124439808
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "tokens": "embedding_rowwise",
        "blocks.*.norm1": "replicated",  # q, k and v take it: one all-reduce for all
        "blocks.*.[qkv]": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_rep",
    }
    """How `%%dist_train tensor` splits it, in the words of Hugging Face's plans."""
    sp_plan: ClassVar[dict[str, str]] = {
        **tp_plan,
        "tokens": "embedding_rowwise_sequence",
        "positions": "embedding_rowwise_sequence",
        "blocks.*.norm1": "sequence",
        "blocks.*.norm2": "sequence",
        "blocks.*.out": "rowwise_sequence",
        "blocks.*.down": "rowwise_sequence",
        "norm": "sequence",
    }
    """The same with what is not split computed for a part of the sequence on each
    rank."""

    def __init__(
        self,
        vocab_size: int = 256,
        *,
        context: int = 128,
        dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(initialize)

    def reset_parameters(self) -> None:
        """Give what is not in a block its values; for models on the meta device."""
        for layer in (self.tokens, self.positions, self.head):
            initialize(layer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialize(module: nn.Module) -> None:
    """Initialize a linear layer or an embedding as GPT-2 does; others stay.

    Parameters
    ----------
    module : nn.Module
        One module, as `nn.Module.apply` passes them.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy over all tokens.

    Parameters
    ----------
    logits : Tensor
        (N, T, vocab_size).
    targets : Tensor
        Token ids, int64 (N, T).

    Returns
    -------
    Tensor
        A scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
