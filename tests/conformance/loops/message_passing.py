"""A gated graph network: a cell is given messages, and the state that these come from;
forward adds messages up, and uses one of a layer's two outputs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 4, 6)  # graphs of four nodes in a ring
y = (x[:, :, 0].sum(1) > 0).long()


class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h, e):
        return torch.tanh(self.message(h)), torch.sigmoid(self.gate(e))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.node, self.edge = nn.Linear(6, 6), nn.Linear(6, 6)
        self.edges = nn.ModuleList(Edges() for _ in range(2))
        self.cells = nn.ModuleList(nn.GRUCell(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h, e = self.node(x), self.edge(x)
        for edges, cell in zip(self.edges, self.cells):
            messages, e = edges(h, e)
            received = torch.zeros_like(messages)
            for node in range(4):
                received[:, node] = messages[:, node - 1] + messages[:, (node + 1) % 4]
            h = cell(received.reshape(-1, 6), h.reshape(-1, 6)).reshape(h.shape)
        return self.head(h.mean(1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    result = model(x[:4].to(device))
