"""GPT-2 124M in bf16 on GPUs: a cell under `%%dist_train` against the same script."""

from statistics import median

from peers import cells
from peers.lab import Labkit
from peers.session import Session
from peers.torchrun import Script
from peers.torchrun import Torchrun

COUNT = "import torch; print(torch.cuda.device_count())"
NAME = "import torch; print(torch.cuda.get_device_name())"
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12}
"""Of dense bf16, by a part of the device's name."""
NUM_PARAMETERS = 124.4e6
DIM, NUM_LAYERS, CONTEXT = 768, 12, 1024
SEQUENCES, STEPS, FIRST_TIMED = 16, 210, 10
"""Sequences of a rank in a step, and steps."""
LIMIT_S = 240.0

TRAINING = f"""
import torch
from torch.nn.parallel import DistributedDataParallel
from labkit.models import GPT, next_token_loss

here = torch.device("cuda", rank)
torch.cuda.set_device(here)
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
model = GPT(50257, context={CONTEXT}, dim={DIM}, num_heads=12, num_layers={NUM_LAYERS})
model = DistributedDataParallel(model.to(here), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
ids = torch.randint(50257, ({SEQUENCES}, {CONTEXT} + 1), device=here)
begins = [torch.cuda.Event(enable_timing=True) for _ in range({STEPS} + 1)]
for step in range({STEPS}):
    begins[step].record()
    with torch.autocast("cuda", torch.bfloat16):
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
begins[-1].record()
torch.cuda.synchronize()
steps = list(zip(begins, begins[1:]))[{FIRST_TIMED}:]
note("seconds", [begin.elapsed_time(end) / 1e3 for begin, end in steps])
"""


class LabkitOnGpus(Labkit):
    """In a cell, with the picture."""

    device = "cuda"

    def cell(self, code: str) -> str:
        return super().cell(on_gpus(code))


class TorchrunOnGpus(Torchrun):
    """As a script."""

    backend = "nccl"

    def begin(self, code: str, *, strategy: str | None = None) -> Script:
        return super().begin(on_gpus(code), strategy=strategy)


def on_gpus(code: str) -> str:
    """The code of `cells`, with what it reduces on the rank's GPU."""
    device = 'torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))'
    code = code.replace("torch.ones(1)", 'torch.ones(1, device="cuda")')
    return f"import os, torch\n{device}\n{code}"


SESSIONS: tuple[type[Session], ...] = (LabkitOnGpus, TorchrunOnGpus)


def tokens_per_s(session: Session) -> tuple[float, float]:
    """Of all ranks together: over all steps, and by the median step."""
    session.forget()
    code = cells.NOTE.format(folder=str(session.folder)) + TRAINING
    ended = session.run(code, LIMIT_S, strategy="")
    if ended.is_error:
        raise RuntimeError(ended.text)
    tokens, by_rank = SEQUENCES * CONTEXT, session.noted("seconds", 1)
    mean = sum(tokens * len(seconds) / sum(seconds) for seconds in by_rank)
    return mean, sum(tokens / median(seconds) for seconds in by_rank)


def utilization(tokens_per_s: float, num_gpus: int, name: str) -> float | None:
    """The share of the GPUs' peak in percent; None of a GPU that is not known."""
    of_attention = 12 * NUM_LAYERS * DIM * CONTEXT
    flops = tokens_per_s * (6 * NUM_PARAMETERS + of_attention)
    peaks = [peak for part, peak in PEAK_FLOPS.items() if part in name]
    return 100 * flops / (num_gpus * peaks[0]) if peaks else None
