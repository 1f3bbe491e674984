"""A thread draws batches ahead, as prefetch_generator's BackgroundGenerator does."""

import queue
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class BackgroundGenerator(threading.Thread):
    def __init__(self, generator, max_prefetch=2):
        super().__init__(daemon=True)
        self.queue = queue.Queue(max_prefetch)
        self.generator = generator
        self.start()

    def run(self):
        for item in self.generator:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


x = torch.randn(32, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)

for epoch in range(2):
    for inputs, labels in BackgroundGenerator(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
