"""Optimizers that call each other's `step`, and accumulation by somebody else's code: a
step counts once, and its loss is what the step descends."""

import textwrap

import numpy as np
import pytest
import torch

from labkit import Lab
from labkit import Run

pytestmark = pytest.mark.timeout(240)

MODEL = """
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

model = nn.Linear(4, 2)
generator = torch.Generator().manual_seed(rank)
batches = [
    (torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator))
    for _ in range(4)
]
computed = []

def compute(x, y):
    loss = F.mse_loss(model(x), y)
    computed.append(loss.item())
    return loss
"""
LOOP = """
for x, y in batches:
    compute(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=2, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        super().__init__(base.param_groups, base.defaults)
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            with torch.no_grad():
                for slow, p in zip(self.slow, fast):
                    slow += self.alpha * (p - slow)
                    p.copy_(slow)
        return loss
"""
OPTIMIZERS = {
    "ZeroRedundancyOptimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DDP(model)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1
)
""",
    "Lookahead": LOOKAHEAD
    + """
model = DDP(model)
optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
""",
    "Lookahead of a Lookahead": LOOKAHEAD
    + """
model = DDP(model)
optimizer = Lookahead(Lookahead(torch.optim.Adam(model.parameters(), lr=0.1)))
""",
    "a wrapper that is no Optimizer": """
class Noam:
    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.count**-0.5, self.count * 2**-1.5)
        self.optimizer.step()
    def zero_grad(self):
        self.optimizer.zero_grad()
model = DDP(model)
optimizer = Noam(torch.optim.Adam(model.parameters()))
""",
}


def train(lab: Lab, strategy: str, *parts: str) -> Run:
    code = "\n".join(textwrap.dedent(each) for each in (MODEL, *parts))
    return lab.train(strategy, code, live=False)


def check(lab: Lab, run: Run, num_steps: int) -> None:
    """As many steps, and the loss of each the mean of those that the cell computed."""
    assert run.num_steps == num_steps
    rows = run.history.dropna(subset=["loss"])
    for rank, computed in enumerate(lab.pull("computed", "all")):
        noticed = rows.loc[rows["rank"] == rank, "loss"]
        expected = np.reshape(computed, (num_steps, -1)).mean(axis=1)
        np.testing.assert_allclose(noticed, expected, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_calls_another_optimizers_counts_once(lab: Lab, name: str) -> None:
    check(lab, train(lab, "raw", OPTIMIZERS[name], LOOP), 4)


def test_a_prepared_optimizer_that_calls_anothers_counts_once(lab: Lab) -> None:
    prepared = """
    from torch.utils.data import TensorDataset
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
    model, optimizer, batches = prepare(model, optimizer, data, batch_size=12)
    """
    check(lab, train(lab, "ddp", LOOKAHEAD, prepared, LOOP), 4)


def test_the_loss_of_a_step_that_the_cell_accumulates_is_whole(lab: Lab) -> None:
    accumulated = """
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches):
        (compute(x, y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    """
    check(lab, train(lab, "raw", accumulated), 2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.long
def test_an_engine_of_deepspeed_counts_its_own_steps(
    lab: Lab, stage: int, precision: str, accumulate: int
) -> None:
    engine = f"""
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    # Or it compiles one for inference, which takes a minute.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    config = {{
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": {accumulate},
        "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1, "torch_adam": True}}}},
        "zero_optimization": {{"stage": {stage}, "reduce_bucket_size": 1000}},
        "bf16": {{"enabled": {precision == "bf16"}}},
    }}
    model, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[  # DeepSpeed takes a step for each group
            {{"params": [model.weight]}},
            {{"params": [model.bias], "weight_decay": 0.0}},
        ],
        config=config,
    )
    dtype = torch.bfloat16 if {precision == "bf16"} else torch.float32
    for x, y in batches:
        loss = compute(x.to(dtype), y.to(dtype))
        model.backward(loss)
        model.step()
    """
    check(lab, train(lab, "raw", engine), 4 // accumulate)
    lab.run("del model, optimizer")


@pytest.mark.long
def test_deepspeed_begins_again_in_another_group(lab: Lab) -> None:
    engine = """
    import os
    import deepspeed
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    dist.init_process_group("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    for x, y in batches:
        model.backward(compute(x, y))
        model.step()
    del model
    dist.destroy_process_group()
    """
    for _ in range(2):
        check(lab, train(lab, "raw", engine), 4)


HOOKED = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
groups = [{"params": each.parameters()} for each in model]
optimizer = torch.optim.SGD(groups, lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
model, optimizer, loader = prepare(
    model, optimizer, samples, batch_size=8, shuffle=False
)
average = [p.detach().clone() for p in model.parameters()]
norms = []

def halve(*step):
    norms.append(sum(p.grad.norm().item() for p in model.parameters()))
    for p in model.parameters():
        p.grad.mul_(0.5)

@torch.no_grad()
def follow(*step):
    for own, p in zip(average, model.parameters()):
        own.lerp_(p, 0.3)

optimizer.register_step_pre_hook(halve)
optimizer.register_step_post_hook(follow)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_hooks_of_a_step_see_the_model_before_and_after_it(
    lab: Lab, strategy: str
) -> None:
    """DeepSpeed steps each group by itself, from parts."""
    found = []
    for each in ("single", strategy):
        lab.run(MODEL)
        lab.train(each, HOOKED, live=False)
        ranks = "0" if each == "single" else "all"
        lab.run("with torch.no_grad(): out = model(torch.eye(4))", ranks=ranks)
        found.append([lab.pull(name) for name in ("average", "norms", "out")])
    torch.testing.assert_close(found[1], found[0])


WRAPPER = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):  # without the base's
        self.inner, self.state = inner, inner.state
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
    def step(self, closure=None):
        return self.inner.step(closure)
    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)
"""
WRAPPED = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset
numbers = torch.Generator().manual_seed(1)
x, y = torch.randn(16, 4, generator=numbers), torch.randn(16, 2, generator=numbers)
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
)
optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
for inputs, targets in loader:
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    out = model(x)
"""


@pytest.mark.parametrize("strategy", ["tensor", "parameter_server"])
def test_a_wrapper_without_hooks_steps_as_in_one_process(
    lab: Lab, strategy: str
) -> None:
    found = []
    for each in ("single", strategy):
        lab.train(each, WRAPPER + WRAPPED, live=False)
        found.append(lab.pull("out", ranks="0"))
    torch.testing.assert_close(found[1], found[0])
