"""train_one_epoch(epoch), a function that uses what is around it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, training_loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def train_one_epoch(epoch_index):
    running_loss = 0.0
    for i, data in enumerate(training_loader):
        inputs, labels = data
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return running_loss / len(training_loader)


for epoch in range(2):
    model.train(True)
    average_loss = train_one_epoch(epoch)

with torch.no_grad():
    result = model(x[:4].to(device))
