"""LoRA merged into its linear layer after training, as one does for inference."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, linear.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(linear.out_features, 2))
        self.is_merged = False

    def forward(self, x):
        out = self.linear(x)
        return out if self.is_merged else out + x @ self.a.T @ self.b.T

    @torch.no_grad()
    def merge(self):
        self.linear.weight += self.b @ self.a
        self.is_merged = True


x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

layers = [LoRALinear(nn.Linear(6, 16)), nn.ReLU(), LoRALinear(nn.Linear(16, 2))]
model = nn.Sequential(*layers)
trainable = filter(lambda p: p.requires_grad, model.parameters())
optimizer = torch.optim.SGD(trainable, lr=0.5, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

for layer in layers[::2]:
    layer.merge()
with torch.no_grad():
    result = model(x[:4].to(device))
