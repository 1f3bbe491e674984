"""PyG's introduction: a graph convolution, trained on the whole graph with a mask."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
adjacency = torch.eye(24) + (torch.rand(24, 24) < 0.1).float()
adjacency = (adjacency / adjacency.sum(1, keepdim=True)).to(device)
train_mask = (torch.arange(24) % 3 > 0).to(device)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Linear(6, 16)
        self.conv2 = nn.Linear(16, 2)

    def forward(self, x, adjacency):
        x = F.relu(adjacency.to(x.dtype) @ self.conv1(x))
        return F.log_softmax(adjacency.to(x.dtype) @ self.conv2(x), dim=1)


model = GCN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

x, y = x.to(device), y.to(device)
for epoch in range(6):
    optimizer.zero_grad()
    out = model(x, adjacency)
    loss = F.nll_loss(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()

with torch.no_grad():
    result = model(x, adjacency)
