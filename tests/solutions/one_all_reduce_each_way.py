import torch.nn.functional as F

from labkit.course import check


class CopyToAll(torch.autograd.Function):
    """Forward: nothing. Backward: all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class SumOfAll(torch.autograd.Function):
    """Forward: all-reduce. Backward: nothing."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def my_perceptron(x, gate, up, down):
    x = CopyToAll.apply(x)
    gated = F.silu(x @ gate.chunk(world_size)[rank].T)
    hidden = gated * (x @ up.chunk(world_size)[rank].T)
    return SumOfAll.apply(hidden @ down.chunk(world_size, dim=1)[rank].T)


check("one_all_reduce_each_way", my_perceptron)
