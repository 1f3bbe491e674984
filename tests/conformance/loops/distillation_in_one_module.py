"""Teacher and student in one module, of which the optimizer has the student."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        self.student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x), target


x = torch.randn(24, 6)
model = Distiller()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.5, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x), batch_size=8, shuffle=False
)

for epoch in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        output, target = model(inputs)
        loss = F.mse_loss(output, target)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))[0]
