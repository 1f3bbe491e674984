"""A class Trainer that sets the learning rate by itself, for each batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Trainer:
    def __init__(self, model, train_loader, optimizer):
        self.model, self.optimizer = model, optimizer
        self.train_loader = train_loader
        self.num_steps = 0

    def train(self, num_epochs):
        for epoch in range(num_epochs):
            self.model.train()
            for inputs, labels in self.train_loader:
                self.num_steps += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.3 * min(1.0, self.num_steps / 6)
                self.loss = F.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                self.loss.backward()
                self.optimizer.step()


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
Trainer(model, loader, optimizer).train(3)

with torch.no_grad():
    result = model(x[:4].to(device))
