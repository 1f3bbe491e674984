"""A test loader under no_grad, its mean loss over the dataset (the quickstart)."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
test_x = torch.randn(12, 6)
test_y = (test_x[:, 0] > test_x[:, 1]).long()
test_dataloader = DataLoader(TensorDataset(test_x, test_y), batch_size=5)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, train_dataloader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def train_loop():
    model.train()
    for X, y in train_dataloader:
        loss = loss_fn(model(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_loop():
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for X, y in test_dataloader:
            X, y = X.to(device), y.to(device)
            prediction = model(X)
            test_loss += loss_fn(prediction, y) * len(y)
            correct += (prediction.argmax(1) == y).sum()
    size = len(test_dataloader.dataset)
    return test_loss / size, correct / size


for epoch in range(2):
    train_loop()
    test_loss, accuracy = test_loop()

with torch.no_grad():
    result = [model(x[:4].to(device)), test_loss]
