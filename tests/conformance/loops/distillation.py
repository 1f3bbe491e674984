"""Knowledge distillation: a frozen teacher beside the student."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad = False
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9)
student, optimizer, loader = prepare(
    student, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

temperature = 2.0
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_loss = (
            F.kl_div(
                F.log_softmax(student_logits / temperature, dim=1),
                F.softmax(teacher_logits / temperature, dim=1),
                reduction="batchmean",
            )
            * temperature**2
        )
        loss = 0.5 * soft_loss + 0.5 * F.cross_entropy(student_logits, labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    result = student(x[:4].to(device))
