"""A loop in the manner of minGPT: a Trainer of its own, with callbacks, whose model
computes its loss; the cell hands it what `prepare` gives."""

import numpy as np
import pytest

from labkit import Lab
from labkit import Run

pytestmark = pytest.mark.timeout(400)

CELL = """
from collections import defaultdict
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

class SortDataset(Dataset):
    def __init__(self, length=6, num_digits=3):
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randint(num_digits, (64, length), generator=generator)
    def __len__(self):
        return len(self.data)
    def __getitem__(self, idx):
        inp = self.data[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: len(inp) - 1] = -1
        return x, y

class GPT(nn.Module):
    def __init__(self, vocab_size=3, n_embd=16, n_head=2, n_layer=2, block_size=11):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
    def forward(self, idx, targets=None):
        t = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        logits = self.lm_head(self.blocks(x, mask=mask, is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
            )
        return logits, loss

class Trainer:
    def __init__(self, model, optimizer, loader, max_iters, grad_norm_clip=1.0):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.max_iters, self.grad_norm_clip = max_iters, grad_norm_clip
        self.callbacks = defaultdict(list)
        self.iter_num = 0
    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)
    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)
    def run(self):
        self.model.train()
        data_iter = iter(self.loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.loader)
                batch = next(data_iter)
            x, y = [t.to(device) for t in batch]
            logits, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.grad_norm_clip
            )
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.max_iters is not None and self.iter_num >= self.max_iters:
                break

torch.manual_seed(0)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=3e-3, betas=(0.9, 0.95),
)
model, optimizer, loader = prepare(model, optimizer, SortDataset(), batch_size=16)
trainer = Trainer(model, optimizer, loader, max_iters=10)
seen = []
trainer.add_callback("on_batch_end", lambda t: seen.append(t.loss.item()))
trainer.run()
"""


def global_losses(run: Run) -> list[float]:
    rows = run.history.dropna(subset=["loss"])
    return rows["loss"].groupby(rows["step"]).mean().tolist()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_trainer_of_ones_own_trains_as_one_process(lab: Lab, strategy: str) -> None:
    one = lab.train("single", CELL, live=False)
    run = lab.train(strategy, CELL, live=False)
    assert run.num_steps == one.num_steps == 10
    np.testing.assert_allclose(global_losses(run), global_losses(one), rtol=1e-4)
    rows = run.history.dropna(subset=["loss"])
    for rank, seen in enumerate(lab.pull("seen", "all")):
        np.testing.assert_allclose(rows.loc[rows["rank"] == rank, "loss"], seen)
