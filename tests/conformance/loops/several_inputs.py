"""Recommender: two kinds of input, one of them integers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(9, 8)
        self.items = nn.Linear(4, 8)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(-1) + self.bias


user, item = torch.randint(0, 9, (24,)), torch.randn(24, 4)
rating = torch.randn(24)
model = Recommender()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(user, item, rating), batch_size=8, shuffle=False
)

for epoch in range(2):
    for users, items, ratings in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, items), ratings)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(user[:4].to(device), item[:4].to(device))
