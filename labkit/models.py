"""Small models for the notebooks and the tests."""

from torch import nn


def mlp(num_inputs: int = 64, num_hidden: int = 64, num_classes: int = 10) -> nn.Module:
    """A perceptron with one hidden layer; the defaults fit `labkit.data.digits`.

    Takes (batch, ...) of `num_inputs` values each, gives (batch, num_classes) logits.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_classes),
    )
