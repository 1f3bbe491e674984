"""Train a small regression with processes that torch.multiprocessing.spawn starts."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("PORT", "12355")
    dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, loader, optimizer, rank, output):
        self.rank = rank
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer
        self.output = output
        self.losses = []

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self._run_batch(source, targets)

    def train(self, max_epochs: int):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
        (self.output / f"losses-{self.rank}.json").write_text(json.dumps(self.losses))
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), self.output / "model.pt")


def main(rank: int, world_size: int, total_epochs: int, output: Path) -> None:
    ddp_setup(rank, world_size)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(48, 20), torch.randn(48, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=sampler)
    Trainer(model, loader, optimizer, rank, output).train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    world_size = 2
    mp.spawn(main, args=(world_size, args.epochs, args.output), nprocs=world_size)
