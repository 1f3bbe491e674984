"""Which part of every tensor each server has."""

from collections.abc import Sequence

import torch


def part_of(tensor: torch.Tensor, place: int, num_servers: int) -> torch.Tensor:
    """The server's part of a flat tensor: all of them are equally long, but for an
    element."""
    size = tensor.numel()
    return tensor[place * size // num_servers : (place + 1) * size // num_servers]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in a row; the tensor's own memory where they are in a row there."""
    return tensor.detach().contiguous().view(-1)


def shape_of_part(shape: Sequence[int], place: int, num_servers: int) -> list[int]:
    """The shape of a server's part: the whole tensor's where there is one server, so
    that an optimizer may look at it as a whole."""
    if num_servers == 1:
        return list(shape)
    size = torch.Size(shape).numel()
    return [(place + 1) * size // num_servers - place * size // num_servers]
