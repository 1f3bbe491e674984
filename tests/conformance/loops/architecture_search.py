"""DARTS of first order: the weights of a mixture of operations are tensors of the model
and no parameters, with an optimizer of their own and batches of their own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x, x_search = torch.randn(24, 6), torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()
y_search = (x_search[:, 0] > x_search[:, 1]).long()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.operations = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), each) for each in (nn.ReLU(), nn.Tanh())
        )
        self.classifier = nn.Linear(8, 2)
        self.alphas = torch.zeros(2, device=device, requires_grad=True)

    def forward(self, x):
        weights = F.softmax(self.alphas, dim=0)
        pairs = zip(weights, self.operations)
        return self.classifier(sum(weight * each(x) for weight, each in pairs))


model = Mixed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
alpha_optimizer = torch.optim.Adam([model.alphas], lr=0.03, betas=(0.5, 0.999))
model, optimizer, loader = prepare(
    model,
    optimizer,
    TensorDataset(x, y, x_search, y_search),
    batch_size=8,
    shuffle=False,
)

for epoch in range(2):
    for inputs, labels, search_inputs, search_labels in loader:
        alpha_optimizer.zero_grad()
        F.cross_entropy(model(search_inputs), search_labels).backward()
        alpha_optimizer.step()

        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

with torch.no_grad():
    result = [model(x[:4].to(device)), model.alphas.detach().clone()]
