"""Layers of torch's transformer use other parameters in evaluation than in training."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(40, 5, 8)
y = (x[:, 0, 0] > x[:, 1, 1]).long()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for step, (inputs, labels) in enumerate(loader):
    model.train()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[:8].to(device)).argmax(1) == y[:8].to(device)).sum()

model.eval()
with torch.no_grad():
    result = model(x[:4].to(device))
