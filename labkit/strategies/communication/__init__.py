"""What data parallelism sends: gradients in few bytes, or parameters seldom."""

from labkit.strategies.communication.half import HalfPrecision
from labkit.strategies.communication.hook import Hook
from labkit.strategies.communication.power_sgd import PowerSGD
from labkit.strategies.communication.top_k import TopK

HOOKS: dict[str, type[Hook]] = {
    "fp16": HalfPrecision,
    "bf16": HalfPrecision,
    "powersgd": PowerSGD,
    "topk": TopK,
}
"""By the word after `--comm`."""
