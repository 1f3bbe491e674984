"""DP-SGD with vmap: each sample's gradient is clipped before their mean is taken."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.func import grad
from torch.func import vmap
from torch.utils.data import TensorDataset

x = torch.randn(24, 6)
y = (x[:, 0] > x[:, 1]).long()

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)


def compute_loss(params, sample, label):
    logits = functional_call(model, params, (sample[None],))
    return F.cross_entropy(logits, label[None])


per_sample = vmap(grad(compute_loss), in_dims=(None, 0, 0))
for epoch in range(2):
    for inputs, labels in loader:
        params = {k: v.detach() for k, v in model.named_parameters()}
        grads = per_sample(params, inputs, labels)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(
            dim=0
        )
        factor = (0.3 / (norm + 1e-6)).clamp(max=1.0)
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", factor, grads[name]) / len(inputs)
        optimizer.step()

with torch.no_grad():
    result = model(x[:4].to(device))
