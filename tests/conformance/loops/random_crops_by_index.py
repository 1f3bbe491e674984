"""nanoGPT's get_batch: no loader at all, random offsets into one long text."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

text = torch.randint(0, 9, (200,))
generator = torch.Generator().manual_seed(7)


def get_batch(batch_size=8, block_size=5):
    starts = torch.randint(len(text) - block_size, (batch_size,), generator=generator)
    x = torch.stack([text[i : i + block_size] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in starts])
    return x.to(device), y.to(device)


model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
model, optimizer, _ = prepare(
    model, optimizer, TensorDataset(text), batch_size=8, shuffle=False
)

for iteration in range(6):
    xb, yb = get_batch()
    loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()

with torch.no_grad():
    result = model(text[:10].view(2, 5).to(device))
