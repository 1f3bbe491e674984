"""Hugging Face's ModelOutput: an OrderedDict whose items are attributes too."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return ModelOutput(logits=logits)
        return ModelOutput(loss=F.cross_entropy(logits, labels), logits=logits)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        loss = model(inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device)).logits
