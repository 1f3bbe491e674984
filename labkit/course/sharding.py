"""An exercise about FSDP's units, and what a model holds in full over a step."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.course.exercise import Verdict
from labkit.models import GPT
from labkit.models import next_token_loss
from labkit.strategies.fsdp import gathered_bytes

Moments = list[tuple[str, list[float]]]


def watch_gathered(model: GPT, *, every_layer: bool = False) -> Moments:
    """A list to which each later step adds what the root and the blocks hold in full,
    whenever the computation comes by a block's attention, or by any layer."""
    moments: Moments = []

    def note(what: str) -> None:
        blocks = [float(gathered_bytes(block)) for block in model.blocks]
        moments.append((what, [gathered_bytes(model) - sum(blocks), *blocks]))

    def watch(layer: nn.Module, number: int) -> None:
        layer.register_forward_pre_hook(lambda *_: note(f"forward {number}"))
        layer.register_full_backward_pre_hook(lambda *_: note(f"backward {number}"))

    for number, block in enumerate(model.blocks):
        layers = [each for each in block.modules() if not any(each.children())]
        for layer in layers if every_layer else layers[1:2]:
            watch(layer, number)
    return moments


def halve_the_blocks(shard: Callable[[GPT], object]) -> Verdict:
    """Judge `shard(model)`, which calls `fully_shard` on parts of a GPT, in place."""
    torch.manual_seed(0)
    plain, model = GPT(context=16), GPT(context=16)
    model.load_state_dict(plain.state_dict())
    in_block = sum(4 * each.numel() for each in plain.blocks[0].parameters())
    of_root = sum(4 * each.numel() for each in plain.parameters()) - (
        len(plain.blocks) * in_block
    )
    shard(model)
    device = next(model.parameters()).device
    plain.to(device)
    tokens = torch.arange(17).repeat(2, 1).to(device)
    x, y = tokens[:, :-1], tokens[:, 1:]
    held = 0  # elements that this rank keeps
    for parameter in model.parameters():
        held += (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
        ).numel()
    whole = sum(each.numel() for each in plain.parameters())
    complaint = ""
    if held > 1.1 * whole / dist.get_world_size():
        complaint = f"a rank keeps {held} of {whole} elements between steps"
    moments = watch_gathered(model, every_layer=True)
    for each in (plain, model):
        next_token_loss(each(x), y).backward()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    for (name, one), other in pairs:
        found, expected = other.grad, one.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        assert expected is not None
        is_same = found is not None and torch.allclose(found, expected, atol=1e-5)
        if not is_same and not complaint:
            complaint = f"the gradient of {name} differs from the plain model's"
    if complaint:
        return Verdict(complaint=complaint)
    most = max(sum(held) for _, held in moments) - of_root
    return Verdict(
        f"blocks hold {most / in_block:.2f} of a block in full",
        "0.5 of a block",
        is_beaten=most <= in_block / 2,
    )
