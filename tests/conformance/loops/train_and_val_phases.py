"""torchvision's transfer tutorial: phases in one loop, with set_grad_enabled."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, train_loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
dataloaders = {
    "train": train_loader,
    "val": DataLoader(TensorDataset(x.flip(1), y), batch_size=8),
}

for epoch in range(2):
    for phase in ["train", "val"]:
        model.train() if phase == "train" else model.eval()
        running_loss = 0.0
        for inputs, labels in dataloaders[phase]:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                loss = criterion(outputs, labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.detach() * inputs.size(0)
        if phase == "train":
            scheduler.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), running_loss / 24]
