"""A class Trainer that holds model, optimizer and loader (the DDP tutorial's)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model, self.optimizer, self.train_data = prepare(
            model, optimizer, train_data, batch_size=8, shuffle=False
        )

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
trainer = Trainer(model, TensorDataset(x, y), optimizer)
trainer.train(2)

with torch.no_grad():
    result = trainer.model(x[:4].to(device))
