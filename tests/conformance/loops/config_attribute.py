"""A model with a config, as Hugging Face's have: model.config is read in the loop."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Classifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.Sequential(
            nn.Linear(config.inputs, 16), nn.ReLU(), nn.Linear(16, config.num_labels)
        )

    def forward(self, x):
        return self.layers(x)


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
model = Classifier(SimpleNamespace(inputs=6, num_labels=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(
            logits.view(-1, model.config.num_labels), labels.view(-1)
        )
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
