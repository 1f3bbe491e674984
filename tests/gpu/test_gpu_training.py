"""Training on GPUs ends where one process ends; what is measured there is there."""

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from labkit import Lab
from labkit import RankError

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(200)]

START = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
random = torch.Generator().manual_seed(1)
x = torch.randn(64, 32, generator=random)
y = torch.randn(64, 8, generator=random)
model = nn.Sequential(
    nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
)
"""
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
PREPARE = """
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=16, shuffle=False
)
"""
LOOP = """
for epoch in range(2):
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = START + ADAMW + PREPARE + LOOP
IN_A_STREAM = (
    START
    + ADAMW
    + PREPARE
    + """
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
"""
    + LOOP.replace("\n", "\n    ")
)
PINNED = (
    START
    + ADAMW
    + """
from torch.utils.data import DataLoader
loader = DataLoader(TensorDataset(x, y), batch_size=16, pin_memory=True, num_workers=2)
model, optimizer, loader = prepare(model, optimizer, loader)
"""
    + LOOP
)
STEPS_BEFORE = """
for a, b in zip(x.split(16), y.split(16)):
    a, b = a.to({where}), b.to({where})
    nn.functional.mse_loss(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ON_CPU = START + ADAMW + STEPS_BEFORE.format(where="'cpu'")
ON_GPU = START + "model.to(device)\n" + ADAMW + STEPS_BEFORE.format(where="device")
FUSED = START + ADAMW.replace("1e-2", "1e-2, fused=True") + PREPARE + LOOP
CAPTURABLE = START + ADAMW.replace("1e-2", "1e-2, capturable=True") + PREPARE + LOOP
COMPILED = START + ADAMW + PREPARE + "model = torch.compile(model)\n" + LOOP
TO_THE_CPU = PLAIN + "    model.cpu()\n    model.to(device)\n"
CHECKPOINTED = (
    START.replace("model = ", "from torch.utils.checkpoint import checkpoint\nbody = ")
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body
    def forward(self, a):
        for layer in self.body:
            a = checkpoint(layer, a, use_reentrant=False)
        return a
model = Model()
"""
    + ADAMW
    + PREPARE
    + LOOP
)
AMP = (
    START
    + ADAMW
    + PREPARE
    + """
scaler = torch.amp.GradScaler("cuda")
for epoch in range(2):
    for a, b in loader:
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(model(a), b)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)
ITEM = PLAIN.replace(
    "optimizer.zero_grad()",
    "optimizer.zero_grad()\n        log(twice=2 * loss.detach())",
)
LARGE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 2**20), nn.Linear(2**20, 8), nn.Linear(8, 2**20), nn.Linear(2**20, 8)
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.ones(64, 8), torch.zeros(64, 8))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=32)
for a, b in loader:
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOPS = {
    "plain": PLAIN,
    "in a stream": IN_A_STREAM,
    "pinned": PINNED,
    "trained on the cpu before": PREPARE + LOOP,
    "trained on the gpu before": PREPARE + LOOP,
    "fused": FUSED,
    "capturable": CAPTURABLE,
    "compiled": COMPILED,
    "activation checkpointing": CHECKPOINTED,
    "to the CPU and back": TO_THE_CPU,
    "logged": ITEM,
    "a GradScaler of its own": AMP,
}
BEFORE = {"trained on the cpu before": ON_CPU, "trained on the gpu before": ON_GPU}
"""Cells that have run before."""
STRATEGIES = [
    *("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"),
    *("tensor", "pipeline", "parameter_server"),
]
NCCL_ONLY = ("tensor",)
REFUSED = {
    **dict.fromkeys(
        [("a GradScaler of its own", f"zero{stage}") for stage in (1, 2, 3)],
        "GradScaler",
    ),
    ("fused", "tensor"): "fused=True",
    ("activation checkpointing", "pipeline"): "--activation-checkpointing",
}
"""Loops under a strategy that does not take them, with a word of the refusal."""
OFFLOAD: dict[str, dict[str, object]] = {
    "fsdp": {"offload_policy": CPUOffloadPolicy()},
    "zero2": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "zero3": {
        "zero_optimization": {
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    },
    "zero3, a part": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    },
}


def losses(
    lab: Lab, strategy: str, code: str, before: str = "", **options: object
) -> list[float]:
    if before:
        lab.run(before)
    run = lab.train(strategy, code, live=False, hang_after=20, **options)
    print(strategy, run.notes, run.mismatches)
    return [float(each) for each in run.mean_loss()["loss"]]


@pytest.fixture(autouse=True)
def can_run(request: pytest.FixtureRequest) -> None:
    """Torch crashes in what ranks with parts of layers exchange over gloo."""
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if values.get("lab") == "gloo" and values.get("strategy") in NCCL_ONLY:
        pytest.skip("layers are split over NCCL alone")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(lab: Lab, loop: str, strategy: str) -> None:
    before = BEFORE.get(loop, "")
    if word := REFUSED.get((loop, strategy)):
        with pytest.raises(RankError, match=word):
            losses(lab, strategy, LOOPS[loop])
        return
    code = PLAIN if loop == "in a stream" else LOOPS[loop]
    wanted = losses(lab, "single", code, before)
    found = losses(lab, strategy, LOOPS[loop], before)
    within = 5e-2 if "Scaler" in loop else 2e-4
    assert len(found) == 8
    assert found == pytest.approx(wanted, rel=within)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pipeline_of_large_activations(nccl: Lab, schedule: str) -> None:
    """Of more bytes than NCCL has room for: who sends waits until they are taken."""
    wanted = losses(nccl, "single", LARGE)
    found = losses(
        nccl, "pipeline", LARGE, schedule=schedule, microbatches=4, timeout=60
    )
    assert found == pytest.approx(wanted, rel=2e-4)


WATCHED = (
    PLAIN.replace("range(2)", "range(8)")
    .replace(
        "        loss = ",
        """        if step == 12:  # the 1st, 3rd and 10th are measured
            torch.cuda.set_sync_debug_mode("warn")
        if step == 28:
            torch.cuda.set_sync_debug_mode("default")
        step += 1
        loss = """,
    )
    .replace(
        "for epoch",
        """import threading
import traceback
import warnings

def note(message, *more, **named):
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and "called a synchronizing" in str(message):
        seen.append("".join(traceback.format_stack()[-6:-1]))

seen, step = [], 0
warnings.simplefilter("always")
warnings.showwarning = note
for epoch""",
    )
)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp"])
def test_a_step_does_not_wait_for_the_gpu(nccl: Lab, strategy: str) -> None:
    """Or the GPU would wait for the next step to be asked for."""
    watched = WATCHED + "torch.cuda.set_sync_debug_mode('warn')\nloss.item()\n"
    watched += "torch.cuda.set_sync_debug_mode('default')"
    losses(nccl, strategy, watched)
    [last, *more] = reversed(nccl.pull("seen", 0))
    assert not more
    assert "loss.item()" in last


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_precision(lab: Lab, strategy: str, precision: str) -> None:
    if precision == "fp16" and strategy in ("pipeline", "parameter_server"):
        with pytest.raises(RankError, match="fp16"):
            losses(lab, strategy, PLAIN, precision=precision)
        return
    wanted = losses(lab, "single", PLAIN)
    found = losses(lab, strategy, PLAIN, precision=precision)
    assert found == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OFFLOAD)
@pytest.mark.parametrize("before", ["", ON_GPU], ids=["new", "trained"])
def test_offload(lab: Lab, name: str, clip: float | None, before: str) -> None:
    code = PREPARE + LOOP if before else PLAIN
    wanted = losses(lab, "single", code, before, clip=clip)
    config = OFFLOAD[name]
    if "part" in name:
        with pytest.raises(RankError, match="leave ratio out"):
            losses(lab, "zero3", code, before, clip=clip, config=config)
        return
    found = losses(lab, name, code, before, clip=clip, config=config)
    assert found == pytest.approx(wanted, rel=2e-4)


def test_a_profile_has_kernels_and_collectives(lab: Lab) -> None:
    code = PLAIN.replace("range(2)", "range(8)")
    run = lab.train("ddp", code, live=False, profile=True)
    print(run.profile)
    text = str(run.profile)
    assert "rank 1: data" in text
    assert "communication 0%" not in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_the_allocators(lab: Lab, strategy: str) -> None:
    wide = PLAIN.replace("256", "2048")
    code = "torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()\n" + wide
    code += "peak = torch.cuda.max_memory_allocated()"
    lab.run("peak = None")
    run = lab.train(strategy, code, live=False)
    peaks = lab.pull("peak", "all")
    print(run.memory.to_string(), peaks)
    for rank, total in run.memory["total_peak"].items():
        if peaks[rank] is None:  # a server's: it does not run the cell
            continue
        assert total <= 1.05 * peaks[rank]
        assert total >= 0.5 * peaks[rank]
