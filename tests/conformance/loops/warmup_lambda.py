"""Hugging Face's linear schedule with warm-up, a LambdaLR over all steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

num_epochs = 2
num_training_steps = num_epochs * len(loader)
num_warmup_steps = num_training_steps // 3


def lr_lambda(step):
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0, num_training_steps - step) / (num_training_steps - num_warmup_steps)


scheduler = LambdaLR(optimizer, lr_lambda)
rates = []
for epoch in range(num_epochs):
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    rates.append(scheduler.get_last_lr()[0])

with torch.no_grad():
    result = [model(x[:4].to(device)), rates]
