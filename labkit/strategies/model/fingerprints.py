"""Numbers by which tensors on several ranks are compared."""

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from labkit.compat.torch import no_dispatch

COLUMNS = 251
"""A prime: rows of a matrix that change places are no multiple of it apart."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """For each tensor an integer that changes with any bit of it.

    It also changes where values swap places, unless these are a multiple of `COLUMNS`
    words of 8 bytes apart: several changes there can cancel out.

    The tensors are summed as words of the sum's own size, for which nothing is copied:
    with words of 4 bytes it would take 20 to 100 times as long.
    """
    sums = torch.stack([column_sums(tensor) for tensor in tensors])
    return scrambled(sums + places_on(sums.device)).sum(1)


@functools.cache
def places_on(device: torch.device) -> torch.Tensor:
    """A number for each column: made each time, a third of what small tensors take."""
    with no_dispatch(), torch.inference_mode(mode=False):
        return scrambled(torch.arange(COLUMNS, device=device))


def column_sums(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as words in rows of `COLUMNS`, summed over the rows."""
    if tensor.is_quantized:  # a view of its bits ends the process
        tensor = tensor.int_repr()
    values = tensor.detach().resolve_conj().resolve_neg().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    values = values.contiguous()
    num_in_word = 8 // values.element_size()
    if values.storage_offset() % num_in_word:
        values = values.clone()
    if not len(values):
        return torch.zeros(COLUMNS, dtype=torch.int64, device=values.device)
    if rest := len(values) % num_in_word:
        values = F.pad(
            values.view(_BITS[values.element_size()]), (0, num_in_word - rest)
        )
    words = values.view(torch.int64)
    num_last = len(words) % COLUMNS
    last = F.pad(words[len(words) - num_last :], (0, COLUMNS - num_last))
    if num_last == len(words):
        return last
    return words[: len(words) - num_last].view(-1, COLUMNS).sum(0) + last


def scrambled(words: torch.Tensor) -> torch.Tensor:
    """Each word of 8 bytes as another one, with no likeness to it.

    Source: the finalizer of Steele et al., "SplitMix64", OOPSLA 2014.
    """
    z = words - 0x61C8864680B583EB  # modulo 2**64 plus 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ (z >> 31 & (1 << 33) - 1)
