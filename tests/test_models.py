import pytest
import torch

from labkit.models import ResNet


def test_a_narrow_resnet_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 7; it must be 8 or more: oneDNN"):
        ResNet(width=7)


def test_the_narrowest_resnet_trains() -> None:
    logits = ResNet(channels=3, width=8)(torch.rand(2, 3, 8, 8))
    logits.sum().backward()
    assert logits.shape == (2, 10)
