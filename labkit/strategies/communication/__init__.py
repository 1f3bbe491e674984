"""What data parallelism sends: gradients in few bytes, or parameters seldom."""

from collections.abc import Mapping
from typing import Any

from labkit.strategies.communication.half import HalfPrecision
from labkit.strategies.communication.hook import Hook
from labkit.strategies.communication.power_sgd import PowerSGD
from labkit.strategies.communication.top_k import TopK
from labkit.strategies.mesh.peers import Peers

HOOKS: dict[str, type[Hook]] = {
    "fp16": HalfPrecision,
    "bf16": HalfPrecision,
    "powersgd": PowerSGD,
    "topk": TopK,
}
"""By the word after `--comm`."""


def hook_of(method: str, peers: Peers, config: Mapping[str, Any]) -> Hook:
    """How the gradients are sent under `--comm method`; ValueError for settings in
    `config` that cannot be."""
    return HOOKS[method](method, peers, config)
