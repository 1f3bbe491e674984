"""A detector: lists of images and targets, and a dict of losses from the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 16)
        self.classes = nn.Linear(16, 2)
        self.boxes = nn.Linear(16, 4)

    def forward(self, images, targets=None):
        found = torch.relu(self.backbone(torch.stack(list(images))))
        if targets is None:
            return self.classes(found)
        number = torch.tensor([len(t["boxes"]) for t in targets], device=found.device)
        found = found.repeat_interleave(number, dim=0)
        labels = torch.cat([t["labels"] for t in targets])
        boxes = torch.cat([t["boxes"] for t in targets])
        return {
            "classes": F.cross_entropy(self.classes(found), labels),
            "boxes": F.smooth_l1_loss(self.boxes(found), boxes),
        }


samples = [
    (x[i], {"labels": y[i].repeat(1 + i % 3), "boxes": torch.randn(1 + i % 3, 4)})
    for i in range(24)
]
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(samples, batch_size=8, collate_fn=lambda b: tuple(zip(*b)))
model, optimizer, loader = prepare(model, optimizer, loader)

for epoch in range(2):
    for images, targets in loader:
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()

with torch.no_grad():
    result = model(list(x[:4].to(device)))
