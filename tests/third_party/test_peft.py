"""LoRA by peft on a tiny language model: by `prepare` under every strategy, by hand."""

from typing import Any

import numpy as np
import pytest

from labkit import Lab
from labkit import Run

pytestmark = pytest.mark.timeout(400)

MODEL = """
import torch.nn.functional as F
from peft import LoraConfig
from peft import get_peft_model
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

def tiny_lora():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
    )
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), lora)

tokens = torch.randint(32, (64, 12), generator=torch.Generator().manual_seed(1))
model = tiny_lora()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-2)
"""
PREPARED = """
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(tokens), batch_size=8, shuffle=False
)
for epoch in range(2):
    for (x,) in loader:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BY_HAND = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

model = DistributedDataParallel(model)
sampler = DistributedSampler(tokens, shuffle=False)
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(tokens), batch_size=4, sampler=sampler):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def global_losses(run: Run) -> list[float]:
    """The mean over ranks: each has as many samples of every batch."""
    rows = run.history.dropna(subset=["loss"])
    return rows["loss"].groupby(rows["step"]).mean().tolist()


@pytest.fixture(scope="module")
def one_process(shared_lab: Lab) -> list[float]:
    """The losses of one rank on the whole batches."""
    run = shared_lab.train("single", MODEL + PREPARED, live=False)
    losses = global_losses(run)
    assert len(losses) == 16
    assert sum(losses[8:]) < sum(losses[:8])
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_lora_under_a_strategy_trains_as_one_process(
    strategy: str, lab: Lab, one_process: list[float]
) -> None:
    run = lab.train(strategy, MODEL + PREPARED, live=False)
    assert run.num_steps == 16
    np.testing.assert_allclose(global_losses(run), one_process, rtol=1e-4)


def test_lora_wrapped_by_hand_trains_as_one_process(
    lab: Lab, one_process: list[float]
) -> None:
    run = lab.train("raw", MODEL + BY_HAND, live=False)
    assert run.num_steps == 16
    np.testing.assert_allclose(global_losses(run), one_process, rtol=1e-4)


def test_the_adapter_can_be_pulled_and_saved(lab: Lab) -> None:
    lab.train("ddp", MODEL + PREPARED, live=False)
    lab.run(
        "from peft import get_peft_model_state_dict\n"
        "plain = getattr(model, 'module', model)\n"
        "adapter = get_peft_model_state_dict(plain)"
    )
    adapters: Any = lab.pull("adapter", "all")
    assert len(adapters[0]) == 8
    for name, value in adapters[0].items():
        assert "lora_" in name
        assert value.equal(adapters[1][name])
