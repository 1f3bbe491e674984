import pytest
import torch

from labkit.models import GPT
from labkit.models import Block
from labkit.models import ResNet


def test_a_narrow_resnet_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 7; it must be 8 or more: oneDNN"):
        ResNet(width=7)


def test_the_narrowest_resnet_trains() -> None:
    logits = ResNet(channels=3, width=8)(torch.rand(2, 3, 8, 8))
    logits.sum().backward()
    assert logits.shape == (2, 10)


def test_a_part_of_the_columns_of_q_k_and_v_is_a_part_of_the_heads() -> None:
    """As tensor parallelism splits them: of one layer for all three, cut in three, a
    part would be queries alone, and no error would say so."""
    torch.manual_seed(0)
    block, x = Block(dim=16, num_heads=4), torch.randn(2, 5, 16)
    whole = {}
    block.out.register_forward_pre_hook(lambda _, args: whole.update(heads=args[0]))
    block(x)
    first, part = whole["heads"], Block(dim=16, num_heads=4)
    part.load_state_dict(block.state_dict())
    for layer in (part.q, part.k, part.v):
        layer.weight = torch.nn.Parameter(layer.weight[:8])
        layer.bias = torch.nn.Parameter(layer.bias[:8])
    part.out = torch.nn.Linear(8, 16)
    part.out.register_forward_pre_hook(lambda _, args: whole.update(heads=args[0]))
    part(x)
    torch.testing.assert_close(whole["heads"], first[..., :8])


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_heads is 3; choose a divisor of dim"):
        GPT(dim=16, num_heads=3)
