"""A recurrent net whose first hidden state has the batch size of the script."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.fc(out[:, -1])


x = torch.randn(24, 5, 3)
y = (x[:, 0, 0] > 0).long()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=False
)

for epoch in range(2):
    for inputs, labels in loader:
        hidden = torch.zeros(1, BATCH_SIZE, 8, device=device)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, hidden), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device), torch.zeros(1, 4, 8, device=device))
