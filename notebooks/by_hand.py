import csv
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(3)
data = Subset(digits(), range(1408))
model = mlp().to(device)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model = DistributedDataParallel(model)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=int(sys.argv[1]), sampler=sampler)
losses = []
for epoch in range(4):
    sampler.set_epoch(epoch)  # or every epoch has the order of the first
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.detach())
mean = torch.stack(losses)
dist.all_reduce(mean)  # of the ranks' losses, which differ: so do their samples
mean /= dist.get_world_size()
if dist.get_rank() == 0:
    with open(sys.argv[2], "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss"])
        writer.writerows(enumerate(mean.tolist(), start=1))
dist.destroy_process_group()
