"""What a loop compiles besides its model: a step, a backward pass, or both."""

import pytest
import torch
from marks import long_but

from labkit import Lab

pytestmark = pytest.mark.timeout(180)

LOOP = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
x, y = torch.randn(16, 6), torch.randn(16, 2)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)

def train(x, y):
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

try:
    COMPILE
    for epoch in range(2):
        for inputs, targets in loader:
            train(inputs, targets)
finally:
    torch.compiler.reset()
    torch._dynamo.config.compiled_autograd = False
with torch.no_grad():
    result = model(x.to(device)).cpu()
"""
BACKWARD_TOO = "torch._dynamo.config.compiled_autograd = True"
CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 10}}


def result_of(lab: Lab, strategy: str, compile_it: str) -> torch.Tensor:
    code = LOOP.replace("COMPILE", compile_it)
    config = CONFIG if strategy == "zero3" else None
    lab.train(strategy, code, live=False, config=config)
    result: torch.Tensor = lab.pull("result")
    return result


@pytest.mark.parametrize(
    "strategy",
    long_but(["ddp", "zero2", "zero3", "fsdp", "pipeline"], "zero2"),
)
@pytest.mark.parametrize("config", ["", BACKWARD_TOO])
def test_a_compiled_function_may_train(lab: Lab, strategy: str, config: str) -> None:
    plain = result_of(lab, "single", "pass")
    compile_it = f"train = torch.compile(train, backend='eager'); {config}"
    compiled = result_of(lab, strategy, compile_it)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
