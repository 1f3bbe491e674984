"""What a loss's graph says of its reduction, on plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.rank.loss.graph import _takes_some_in_order
from labkit.rank.loss.kind import BALANCE
from labkit.rank.loss.kind import BY_COUNTS
from labkit.rank.loss.kind import CONSTANT
from labkit.rank.loss.kind import CURVED_MEAN
from labkit.rank.loss.kind import MEAN_IN_SUM
from labkit.rank.loss.kind import NORMALIZED
from labkit.rank.loss.kind import PAIRS
from labkit.rank.loss.kind import PARTLY_SUM
from labkit.rank.loss.kind import PENALTY_IN_SUM
from labkit.rank.loss.kind import SORTED
from labkit.rank.loss.kind import SUM
from labkit.rank.loss.kind import SUM_OUTSIDE
from labkit.rank.loss.kind import UNEVEN
from labkit.rank.loss.kind import WEIGHTED
from labkit.rank.loss.kind import LossWatch

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
T = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
WHOLE = torch.tensor([0, 1, 3, 2])
PARTLY = torch.tensor([0, -100, 3, 2])
WEIGHTS = torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0])
MASK = torch.tensor([True, False, True, True])
ADVANTAGES = (X[:, 0] - X[:, 0].mean()) / (X[:, 0].std() + 1e-8)
NORMALIZED_T = (T - T.mean()) / (T.std() + 1e-8)
IN_GROUPS = (T - T.mean(1, keepdim=True)) / T.std(1, correction=0, keepdim=True)
SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4])
LABELS = torch.tensor([1.0, 0.0, 0.0, 0.0])
HITS = (T > 0.3).float()
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
Loss = Callable[[Tensor], Tensor]

P = nn.Parameter(torch.randn(7, 3, generator=torch.Generator().manual_seed(2)))
Q = nn.Parameter(torch.ones(3))
S = nn.Parameter(torch.zeros(3))


def written(*losses: Tensor) -> Tensor:
    """Losses in a tensor that was made for them; without any those of weights."""
    losses = losses or (P.square().sum(), Q.square().sum())
    found = torch.empty(len(losses))
    for at, loss in enumerate(losses):
        found[at] = loss
    return found


def of_each(x: Tensor, reduction: str = "mean") -> list[Tensor]:
    return [F.mse_loss(x[i], T[i], reduction=reduction) for i in range(len(x))]


def added(losses: list[Tensor]) -> Tensor:
    return torch.as_tensor(sum(losses))


def squared_by_product(e: Tensor) -> Tensor:
    return (e * e).sum()


def dice(x: Tensor, dim: int | None = None) -> Tensor:
    p = x.sigmoid()
    both = (p * T).sum() if dim is None else (p * T).sum(dim)
    all_of = p.sum() + T.sum() if dim is None else p.sum(dim) + T.sum(dim)
    return 1 - ((2 * both + 1) / (all_of + 1)).mean()


def dice_in_rows(x: Tensor) -> Tensor:
    """Of two classes, with a column for each pixel of the batch."""
    p, t = (torch.stack([1 - each, each]).flatten(1) for each in (x.sigmoid(), T))
    return 1 - (2 * (p * t).sum(-1) / (p + t).sum(-1)).mean()


def paired(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def balance(x: Tensor, experts: int = 5) -> Tensor:
    """As Switch Transformers' of one layer."""
    p = x[:, :experts].softmax(1)
    shares = F.one_hot(p.argmax(1), experts).float().mean(0)
    return (shares * p.mean(0)).sum() * experts


def balance_of_layers(x: Tensor, experts: int) -> Tensor:
    """As transformers' of several layers."""
    layers = [each[:, :experts].softmax(1) for each in (x, x * T)]
    counts, total, rows = torch.zeros(experts), torch.zeros(experts), 0.0
    for p in layers:
        counts = counts + F.one_hot(p.topk(2, 1)[1].flatten(), experts).float().sum(0)
        total, rows = total + p.sum(0), rows + len(p)
    return ((counts / rows) * (total / rows).unsqueeze(0)).sum() * experts


def balance_by_dot(x: Tensor) -> Tensor:
    p = x.softmax(1)
    return torch.dot(F.one_hot(p.argmax(1), 5).float().mean(0), p.mean(0))


def clip(x: Tensor) -> Tensor:
    scores = F.normalize(x) @ F.normalize(x * T).T * Q[0].exp()
    return (paired(scores) + paired(scores.T)) / 2


def simclr(x: Tensor) -> Tensor:
    views = F.normalize(torch.cat([x, x * T]))
    scores = (views @ views.T / 0.1).masked_fill(torch.eye(8).bool(), -9e15)
    return F.cross_entropy(scores, torch.arange(8).roll(4))


def triplets(x: Tensor) -> Tensor:
    return F.relu(1 + torch.cdist(x, x * 2) - (x - T).norm(dim=1)).mean()


HARDEST = torch.tensor([3, 1])
"""Places of samples, in the order that `argsort` may give."""


NEAREST = torch.tensor([2, 0, 0, 2])
"""Of each sample the place of another."""


def triplets_by_places(x: Tensor) -> Tensor:
    anchors, positives = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 3, 2, 3])
    distances = (x[anchors] - x[positives]).square().sum(1)
    return F.relu(distances - (x[anchors] - T[positives]).square().sum(1) + 1).mean()


def experts(x: Tensor) -> Tensor:
    """Each sample at two of three experts, which have as many."""
    parts = [[0, 1], [2, 3], [1, 3]]
    out = torch.zeros_like(x)
    for scale, places in enumerate(map(torch.tensor, parts), start=1):
        out = out.index_add(0, places, x[places] * scale)
    return F.mse_loss(out, T)


def hardest(take: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return take(F.cross_entropy(x, WHOLE, reduction="none"), HARDEST).mean()


class AllGather(torch.autograd.Function):
    """As a collective of a rank that is alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cat([x, x])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[:4] + gradient[4:]


class Gather(AllGather):
    """Another name for it, which torch's own has as well."""


def gathered(x: Tensor, gather: Any = AllGather) -> Tensor:
    return paired(gather.apply(x) @ gather.apply(x * 2).T)


def attention_in_a_loop(x: Tensor) -> Tensor:
    scores = [(each[:4, None] * 2) @ each[None, :4] for each in x]
    return torch.stack([F.softmax(each, -1).mean() for each in scores]).mean()


def sent(x: Tensor) -> Tensor:
    one, other = torch.cat([x, X]), torch.cat([x * 2, X])
    return paired(one @ other.T)


def learned(x: Tensor) -> Tensor:
    losses = [F.mse_loss(x, T), F.cross_entropy(x, WHOLE), x.abs().mean()]
    return (torch.exp(-S) * torch.stack(losses) + S).sum()


def steps(x: Tensor) -> Tensor:
    """Of each step the losses of all samples."""
    return torch.stack([(x[:, t] - T[:, t]).square() for t in range(x.shape[1])])


RIGHT: dict[str, Loss] = {
    "the largest of each sample": lambda x: x.square().topk(2)[0].mean(),
    "each sample's numbers in order": lambda x: x.sort(1)[0][:, 1:].square().mean(),
    "the hardest of each sample by itself": lambda x: added(
        [(x[i] - T[i]).square().repeat(4).topk(3)[0].mean() / 4 for i in range(4)]
    ),
    "every other sample": lambda x: F.cross_entropy(
        x[torch.tensor([False, True, False, True])], WHOLE[:2]
    ),
    "all samples in another order": lambda x: F.cross_entropy(
        x[torch.tensor([3, 1, 0, 2])], WHOLE
    ),
    "a number of each sample": lambda x: (
        -x.log_softmax(1).gather(1, torch.tensor([[3], [0], [2], [1]])).mean()
    ),
    "cross entropy": lambda x: F.cross_entropy(x, WHOLE),
    "a fraction of it": lambda x: 0.5 * F.cross_entropy(x, WHOLE) / 3,
    "in bf16": lambda x: F.cross_entropy(x, WHOLE).to(torch.bfloat16),
    "smoothed": lambda x: F.cross_entropy(x, WHOLE, label_smoothing=0.1),
    "mse": lambda x: F.mse_loss(x, T),
    "mean": lambda x: x.square().mean(),
    "divided": lambda x: x.square().sum() / len(x),
    "divided by all": lambda x: x.square().sum() / x.numel(),
    "dot over samples": lambda x: torch.dot(x[:, 0], T[:, 0]) / len(x),
    "einsum over samples": lambda x: torch.einsum("bd,bd->", x, T) / len(x),
    "weights of tasks": lambda x: (
        torch.stack([x.mean(), F.mse_loss(x, T), x.abs().mean()])
        @ torch.tensor([0.5, 0.2, 0.3])
    ),
    "largest of each": lambda x: x.max(1).values.mean(),
    "largest taken off": lambda x: (x - x.max().detach()).exp().sum(1).log().mean(),
    "largest taken off, too": lambda x: (x - x.max()).exp().sum(1).log().mean(),
    "complex": lambda x: (
        F.mse_loss(x, T)
        + 0.1 * torch.view_as_complex(P[:, :2].contiguous()).sum().abs()
    ),
    "in half": lambda x: F.cross_entropy(
        x.repeat(1023 * 3, 1).bfloat16(), WHOLE.repeat(1023 * 3)
    ),
    "in half, many": lambda x: F.cross_entropy(
        x.repeat(20_000, 1).half(), WHOLE.repeat(20_000)
    ),
    "half of it": lambda x: 0.5 * x.square().sum() / len(x),
    "divided again": lambda x: x.square().sum() / len(x) / 2,
    "times a fraction": lambda x: x.square().sum() * 0.25,
    "batchmean": lambda x: F.kl_div(x.log_softmax(1), T, reduction="batchmean"),
    "two means": lambda x: F.cross_entropy(x, WHOLE) + 0.1 * x.square().mean(),
    "heads": lambda x: added([w * F.cross_entropy(x, WHOLE) for w in (1, 0.5, 0.1)]),
    "time steps": lambda x: added([F.cross_entropy(x * t, WHOLE) for t in range(1, 5)]),
    "each sample's mean": lambda x: added(of_each(x)) / len(x),
    "a list's mean": lambda x: torch.stack(of_each(x)).mean(),
    "norms": lambda x: (x - T).norm(dim=1).mean(),
    "a list of roots": lambda x: torch.stack([o.sqrt() for o in of_each(x)]).mean(),
    "a sum of roots": lambda x: added([o.sqrt() for o in of_each(x)]) / len(x),
    "dice of each": lambda x: dice(x, 1),
    "logsumexp": lambda x: (x.logsumexp(1) - x[:, 0]).mean(),
    "layer norm": lambda x: F.layer_norm(x, (5,)).pow(3).mean(),
    "learned weights": learned,
    "a learned weight": lambda x: torch.exp(-Q[0]) * F.mse_loss(x, T) + Q[0],
    "temperature": lambda x: F.cross_entropy(x / Q[0].exp(), WHOLE),
    "squares of weights": lambda x: F.mse_loss(x, T) + 0.1 * P.square().sum(),
    "a mean of weights": lambda x: F.mse_loss(x, T) + 0.1 * P.abs().mean(),
    "written squares of weights": lambda x: F.mse_loss(x, T) + written().sum(),
    "a root of weights": lambda x: F.mse_loss(x, T) + P.square().sum().sqrt(),
    "norms of weights": lambda x: F.mse_loss(x, T) + P.norm() + Q.norm(),
    "orthogonality": lambda x: F.mse_loss(x, T) + (P.T @ P - torch.eye(3)).norm(),
    "a distance": lambda x: F.mse_loss(x, T) + (P - torch.ones(7, 3)).square().sum(),
    "a bound unreached": lambda x: F.mse_loss(x, T).clamp(max=1e4),
    "flooding unreached": lambda x: (F.mse_loss(x, T) - 1e-3).abs() + 1e-3,
    "advantages of all": lambda x: (x[:, 0] * (2 * ADVANTAGES + 1)).mean(),
    "advantages in each group": lambda x: -(x * IN_GROUPS).mean(),
    "signs": lambda x: F.relu(1 - SIGNS * x[:, 0]).mean(),
    "half of the batch": lambda x: F.cross_entropy(x[:2], WHOLE[:2]) / 2,
    "the mean of a loss": lambda x: F.cross_entropy(x, WHOLE).mean(),
    "as many classes as samples": lambda x: F.cross_entropy(x[:, :3] @ P[:4].T, WHOLE),
    "a queue": lambda x: paired(x @ T.T),
    "within samples": lambda x: torch.bmm(x[:, :4, None], x[:, None, :4]).mean(),
    "gathered": gathered,
    "gathered by Gather": lambda x: gathered(x, Gather),
    "attention in a loop": attention_in_a_loop,
    "two embeddings added": lambda x: (
        (x[:, None, :3] * 2 + (P[:4] * 1)[None] + x[:, :4, None]).square().mean()
    ),
    "beside what is sent": sent,
    "means of steps": lambda x: steps(x).mean(1).sum(),
    "means of as many steps": lambda x: steps(x[:, :4]).mean(1).sum(),
    "means of steps, and others": lambda x: (
        steps(x).mean(1).sum() + torch.stack([x[:, t].mean() for t in range(5)]).sum()
    ),
    "means of as many classes": lambda x: (
        F.cross_entropy(x, WHOLE)
        + 4 * (WEIGHTS[:4] * x[:, :4].softmax(1).mean(0)).sum()
    ),
    "learned weights of as many means": lambda x: (P[0, 0] * x[:, :4].mean(0)).sum(),
    "divided before, then a mean": lambda x: (x.square() / len(x)).mean(1).sum(),
    "over dimension 0 of a mean": lambda x: F.mse_loss(x, T).mean(0),
    "over dimension -1 of a mean": lambda x: F.mse_loss(x, T).sum(-1),
    "divided before": lambda x: (x.square() / len(x)).sum(),
    "divided, then gathered": lambda x: (
        -(x.log_softmax(1) / len(x)).gather(1, WHOLE[:, None]).sum()
    ),
    "divided, then chosen": lambda x: torch.where(MASK, x.mean(1) / len(x), 0).sum(),
    "divided, then masked": lambda x: (x.mean(1) / len(x)).masked_fill(MASK, 0).sum(),
    "divided, then left out": lambda x: (x.mean(1) / len(x))[MASK].sum(),
    "divided, then in part": lambda x: (x.square() / len(x))[:, :2].sum(),
    "divided, then a column": lambda x: (x.square() / len(x))[:, 0].sum(),
    "divided, then in parts": lambda x: added(
        [part.sum() for part in (x.square() / len(x)).split(2)]
    ),
    "divided, then a dot": lambda x: torch.dot(x.mean(1) / len(x), T[:, 0]),
    "divided, then added by a product": lambda x: (x.mean(1) / len(x)) @ torch.ones(4),
    "divided, then einsum": lambda x: torch.einsum("ij,ij->", x / len(x), T),
    "divided, then no NaN": lambda x: (x.mean(1) / len(x)).nan_to_num().sum(),
    "divided, then returns": lambda x: (x / len(x)).flip(1).cumsum(1).sum(),
    "divided errors": lambda x: ((x - T) / len(x)).abs().sum(),
    "divided errors, by a norm": lambda x: ((x - T) / len(x)).norm(p=1),
    "divided hinges": lambda x: ((1 - x * T) / len(x)).clamp(min=0).sum(),
    "divided hinges, by relu": lambda x: F.relu((1 - x * T) / len(x)).sum(),
    "divided quantiles": lambda x: torch.maximum(
        0.9 * (x - T) / len(x), -0.1 * (x - T) / len(x)
    ).sum(),
    "divided, times a learned weight": lambda x: (Q[0] * (x.mean(1) / len(x))).sum(),
    "a bound for each column unreached": lambda x: torch.maximum(
        x.square().mean(0), torch.full((5,), 1e-9)
    ).sum(),
    "a sum of a row of means": lambda x: (
        (x.softmax(1).mean(0)[None] * torch.arange(5.0)).sum(-1).mean()
    ),
    "a sum of a row of as many means": lambda x: (
        (x[:, :4].softmax(1).mean(0)[None] * torch.arange(4.0)).sum(-1).mean()
    ),
    "means of each sample's steps": lambda x: (
        (x[:, :4].T[:, :, None] * T[:4, :].T[None, :4]).mean(2).square().mean()
    ),
    "experts": experts,
    "gates of experts": lambda x: (
        x.softmax(1)[torch.tensor([0, 2, 1, 3, 0, 1, 2, 3])].square().mean()
    ),
    "parts of samples": lambda x: (
        (x.square()[torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])] - P[0, 0]).square().mean()
    ),
    "an element": lambda x: x[0, 0],
    "a vector": lambda x: x.sum(1),
    "no graph": lambda x: x.detach().sum(),
}
NOTED: dict[str, tuple[Loss, str]] = {
    "ignored": (lambda x: F.cross_entropy(x, PARTLY), UNEVEN),
    "all ignored": (
        lambda x: F.cross_entropy(x, torch.full_like(WHOLE, -100)) + x.square().mean(),
        UNEVEN,
    ),
    "2d": (lambda x: F.cross_entropy(x.T[None], PARTLY[None]), UNEVEN),
    "dot": (lambda x: -torch.dot(x[:, 0], T[:, 0]), SUM),
    "matmul": (lambda x: -(x[:, 0] @ T[:, 0]), SUM),
    "einsum": (lambda x: torch.einsum("bd,bd->", x, T), SUM),
    "largest": (lambda x: x.max(), CURVED_MEAN),
    "class weights": (lambda x: F.cross_entropy(x, WHOLE, WEIGHTS), UNEVEN),
    "masked": (lambda x: x.square()[MASK].mean(), UNEVEN),
    "by its mask": (lambda x: (x.sum(1) * MASK).sum() / MASK.sum(), UNEVEN),
    "ignored, and another": (
        lambda x: F.cross_entropy(x, PARTLY) + 0.01 * x.square().mean(),
        UNEVEN,
    ),
    "ignored, and a penalty": (
        lambda x: F.cross_entropy(x, PARTLY) + 0.01 * P.square().sum(),
        UNEVEN,
    ),
    "ignored, smoothed": (
        lambda x: F.cross_entropy(x, PARTLY, label_smoothing=0.1),
        UNEVEN,
    ),
    "sum": (lambda x: x.square().sum(), SUM),
    "over dims": (lambda x: x.square().sum((0, 1)), SUM),
    "cross entropies": (lambda x: F.cross_entropy(x, WHOLE, reduction="sum"), SUM),
    "l1": (lambda x: F.l1_loss(x, T, reduction="sum"), SUM),
    "two of them": (
        lambda x: F.l1_loss(x, T, reduction="sum") - 0.5 * x.square().sum(),
        SUM,
    ),
    "of a list": (lambda x: -torch.stack([x[0, 0], x[1, 1]]).sum(), SUM),
    "in a loop": (lambda x: added(of_each(x)), SUM),
    "sums in a loop": (lambda x: added(of_each(x, "sum")), SUM),
    "a list's sum": (lambda x: torch.stack(of_each(x)).sum(), SUM),
    "a mean and a sum": (
        lambda x: F.cross_entropy(x, WHOLE) + 0.5 * (x * T + T).square().sum(),
        PARTLY_SUM,
    ),
    "sum of means": (lambda x: x.square().mean(1).sum(), SUM),
    "sum of written means": (lambda x: written(*of_each(x)).sum(), SUM),
    "sum of means of as many": (lambda x: x[:, :4].square().mean(1).sum(), SUM),
    "sum of a list's means": (lambda x: torch.stack([*(x * T)]).mean(1).sum(), SUM),
    "sum over all steps": (lambda x: steps(x).sum(), SUM),
    "over dimension 0 of a sum": (lambda x: x.square().sum().sum(0), SUM),
    "sum with a temperature": (
        lambda x: F.kl_div((x / 4).log_softmax(1), T.softmax(1), reduction="sum"),
        SUM,
    ),
    "sum of squares of parts": (lambda x: (x / 4 - T).square().sum(), SUM),
    "sum of products of parts": (lambda x: squared_by_product(x / 4 - T), SUM),
    "sum of products of equal parts": (
        lambda x: ((x / 4 - T) * (x / 4 - T)).sum(),
        SUM,
    ),
    "sum of a dot of parts": (
        lambda x: torch.dot(x.mean(1) / 4 - T[:, 0], x.mean(1) / 4 - T[:, 0]),
        SUM,
    ),
    "sum of absolute errors of parts": (lambda x: (x / 4 - T).abs().sum(), SUM),
    "sum of hinges of parts": (lambda x: (1 - x / 4 * T).clamp(min=0).sum(), SUM),
    "sum of bounded parts": (lambda x: (x / 4).clamp(max=0.1).sum(), SUM),
    "sum of some parts": (lambda x: (x / 4)[:2].sum(), SUM),
    "sum of quantiles of parts": (
        lambda x: torch.where(
            x > T, 0.9 * (x / 4 - T[:, :1]), 0.1 * (T[:, :1] - x / 4)
        ).sum(),
        SUM,
    ),
    "sum of errors of parts": (lambda x: F.mse_loss(x / 4, T, reduction="sum"), SUM),
    "sum of weighted means": (lambda x: (x.mean(1) * T.mean(1)).sum(), SUM),
    "by a constant": (
        lambda x: F.cross_entropy(x, WHOLE, reduction="sum") / 8,
        CONSTANT,
    ),
    "by len(dataset)": (lambda x: x[:, 0].square().sum() / 24, CONSTANT),
    "in a loop, by a constant": (lambda x: added(of_each(x)) / 8, CONSTANT),
    "rmse": (lambda x: torch.sqrt(F.mse_loss(x, T) + 1e-6), CURVED_MEAN),
    "rmse and a mean": (lambda x: F.mse_loss(x, T) ** 0.5 + x.mean(), CURVED_MEAN),
    "rmse of each column": (
        lambda x: F.mse_loss(x, T, reduction="none").mean(0).sqrt().mean(),
        CURVED_MEAN,
    ),
    "norm": (lambda x: (x - T).norm(), CURVED_MEAN),
    "perplexity": (lambda x: F.cross_entropy(x, WHOLE).exp(), CURVED_MEAN),
    "dice": (dice, CURVED_MEAN),
    "dice of classes": (lambda x: dice(x, 0), CURVED_MEAN),
    "a product": (lambda x: x.mean() * F.mse_loss(x, T), CURVED_MEAN),
    "a bound": (lambda x: F.mse_loss(x, T).clamp(max=1e-4), CURVED_MEAN),
    "normalized": (
        lambda x: ((x[:, 0] - x[:, 0].mean()) / x[:, 0].std()).pow(3).mean(),
        CURVED_MEAN,
    ),
    "advantages": (lambda x: -(x[:, 0] * ADVANTAGES).mean(), NORMALIZED),
    "advantages of each action": (lambda x: -(x * NORMALIZED_T).mean(), NORMALIZED),
    "weights with a sum of 1": (
        lambda x: (x.square().mean(1) * SHARES).sum(),
        WEIGHTED,
    ),
    "a pos_weight of the batch": (
        lambda x: F.binary_cross_entropy_with_logits(
            x[:, 0], LABELS, pos_weight=(1 - LABELS).sum() / LABELS.sum()
        ),
        BY_COUNTS,
    ),
    "a pos_weight of the batch for each class": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, HITS, pos_weight=(1 - HITS).sum(0) / HITS.sum(0)
        ),
        BY_COUNTS,
    ),
    "pairs": (lambda x: paired(x @ (x * T).T), PAIRS),
    "pairs by einsum": (lambda x: paired(torch.einsum("id,jd->ij", x, x * T)), PAIRS),
    "pairs, both ways": (clip, PAIRS),
    "two views": (simclr, PAIRS),
    "pairs beside a constant": (
        lambda x: paired(torch.cat([x, T], 1) @ torch.cat([x, T], 1).T),
        PAIRS,
    ),
    "distances": (lambda x: F.pdist(x).mean(), PAIRS),
    "correlations of many": (
        lambda x: torch.corrcoef(x.repeat(1, 3)[:, :12].T).pow(2).mean(),
        CURVED_MEAN,
    ),
    "triplets": (triplets, PAIRS),
    "pairs by broadcasting": (
        lambda x: paired(F.cosine_similarity(x[:, None], (x * T)[None], dim=-1)),
        PAIRS,
    ),
    "differences of pairs": (
        lambda x: F.softplus((x[:, 0] * 2)[:, None] - (x[:, 0] * 3)[None]).mean(),
        PAIRS,
    ),
    "correlations": (lambda x: torch.corrcoef(x.T).pow(2).mean(), CURVED_MEAN),
    "a Gram matrix": (lambda x: (x.T @ (x * T) / 4 - 1).pow(2).sum(), CURVED_MEAN),
    "the hardest samples": (
        lambda x: F.cross_entropy(x, WHOLE, reduction="none").topk(2)[0].mean(),
        SORTED,
    ),
    "the hardest sample": (
        lambda x: F.cross_entropy(x, WHOLE, reduction="none").topk(1)[0].mean(),
        SORTED,
    ),
    "the hardest numbers": (
        lambda x: (x - T).square().flatten().topk(5)[0].mean(),
        SORTED,
    ),
    "all but the hardest": (
        lambda x: F.cross_entropy(x, WHOLE, reduction="none").sort()[0][:3].mean(),
        SORTED,
    ),
    "the hardest samples by their places": (
        lambda x: hardest(Tensor.__getitem__, x),
        SORTED,
    ),
    "the same, selected": (
        lambda x: hardest(lambda losses, order: losses.index_select(0, order), x),
        SORTED,
    ),
    "the same, gathered": (
        lambda x: hardest(lambda losses, order: losses.gather(0, order), x),
        SORTED,
    ),
    "the samples with the largest losses": (
        lambda x: F.cross_entropy(x[HARDEST], WHOLE[HARDEST]),
        SORTED,
    ),
    "samples in order": (lambda x: F.mse_loss(x.sort(0)[0], T.sort(0)[0]), SORTED),
    "samples in order along columns": (
        lambda x: F.mse_loss(x.T.sort(1)[0], T.T.sort(1)[0]),
        SORTED,
    ),
    "pairs and a mean": (lambda x: clip(x) + F.mse_loss(x, T), PAIRS),
    "triplets by their places": (lambda x: triplets_by_places(x), PAIRS),
    "the nearest one": (lambda x: (x - x[NEAREST]).norm(dim=1).log().mean(), PAIRS),
    "dice of classes in rows": (lambda x: dice_in_rows(x), CURVED_MEAN),
    "a Gram matrix by einsum": (
        lambda x: torch.einsum("bi,bj->ij", x, x * T).div(4).pow(2).mean(),
        CURVED_MEAN,
    ),
    "columns brought to a norm": (
        lambda x: F.mse_loss(F.normalize(x, dim=0), F.normalize(T, dim=0)),
        CURVED_MEAN,
    ),
    "similarities of columns": (
        lambda x: 1 - F.cosine_similarity(x, T, dim=0).mean() + F.mse_loss(x, T),
        CURVED_MEAN,
    ),
    "beside a mean with a weight": (
        lambda x: (x.norm(dim=1) - 0.1 * x.norm(dim=1).mean()).square().mean(),
        CURVED_MEAN,
    ),
    "entropy of a mean row": (
        lambda x: (
            (x.softmax(1).mean(0)[None] * x.softmax(1).mean(0)[None].log())
            .sum(-1)
            .mean()
        ),
        CURVED_MEAN,
    ),
    "a bound for each column": (
        lambda x: torch.maximum(x.square().mean(0), torch.full((5,), 0.5)).sum(),
        CURVED_MEAN,
    ),
    "the greater of two means": (
        lambda x: torch.maximum(F.mse_loss(x, T), x.abs().mean()),
        CURVED_MEAN,
    ),
}


def noted(make: Loss, num_samples: int | None = 4) -> str | None:
    return LossWatch().look(make(X.clone().requires_grad_()), num_samples, 1)


def test_places_in_what_has_no_known_shape_are_no_error() -> None:
    taken = (P * 2)[HARDEST].grad_fn
    assert _takes_some_in_order(taken, "Index", tuple(P.shape))
    assert not _takes_some_in_order(taken, "Index", ())


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_noted(name: str) -> None:
    assert noted(RIGHT[name]) is None


@pytest.mark.parametrize("name", NOTED)
def test_what_is_noted(name: str) -> None:
    make, expected = NOTED[name]
    assert noted(make) == expected
    assert "one process" in expected


def test_weights_with_a_mean_of_1_are_noted_once_they_have_it_again() -> None:
    watch = LossWatch()
    x = X.clone().requires_grad_()
    same = 4 * SHARES.flip(0)
    for at, weights in enumerate((4 * SHARES, SHARES + 1, 4 * SHARES, same), start=1):
        assert watch.look((x.square().mean(1) * weights).mean(), 4, at) is None
    other = (2 * SHARES + 0.5) * x.square().mean(1)
    assert watch.look(other.mean(), 4, 5) == WEIGHTED


BALANCED: dict[str, Loss] = {
    "beside a mean": lambda x: F.mse_loss(x, T) + 0.1 * balance(x),
    "as many experts": lambda x: F.cross_entropy(x, WHOLE) + 0.1 * balance(x, 4),
    "layers": lambda x: F.mse_loss(x, T) + 0.1 * balance_of_layers(x, 5),
    "layers of as many": lambda x: F.mse_loss(x, T) + 0.1 * balance_of_layers(x, 4),
    "by dot": lambda x: F.mse_loss(x, T) + balance_by_dot(x),
    "alone": balance,
}


@pytest.mark.parametrize("name", BALANCED)
def test_a_balance_of_experts_is_noted_once_their_shares_change(name: str) -> None:
    watch = LossWatch()
    batches = [X, X, X.flip(1) * 2]
    found = [
        watch.look(BALANCED[name](x.clone().requires_grad_()), 4, at)
        for at, x in enumerate(batches, start=1)
    ]
    assert found == [None, None, BALANCE]


def test_other_reasons_go_before_a_balance_of_experts() -> None:
    watch = LossWatch()
    for at, x in enumerate((X, X.flip(1)), start=1):
        x = x.clone().requires_grad_()
        assert watch.look(F.cross_entropy(x, PARTLY) + balance(x), 4, at) == UNEVEN


def test_a_balance_of_experts_is_noted_beside_sums() -> None:
    watch = LossWatch(is_sum=True)
    losses = [x.clone().requires_grad_() for x in (X, X.flip(1))]
    losses = [F.mse_loss(x, T, reduction="sum") + balance(x) for x in losses]
    assert [watch.look(each, 4, 1 + at) for at, each in enumerate(losses)] == [
        None,
        BALANCE,
    ]


def test_of_a_loss_over_data_of_the_loops_own_sums_alone_are_noted() -> None:
    assert noted(lambda x: x.square().sum(), None) == SUM_OUTSIDE
    assert noted(lambda x: x.square().sum() + x.mean(), None) == SUM_OUTSIDE
    for make in (RIGHT["cross entropy"], NOTED["ignored"][0], NOTED["rmse"][0]):
        assert noted(make, None) is None


OF_SUMS: dict[str, tuple[Loss, str | None]] = {
    "mean": (lambda x: F.cross_entropy(x, WHOLE), MEAN_IN_SUM),
    "masked": (lambda x: x.square()[MASK].mean(), MEAN_IN_SUM),
    "sum and mean": (lambda x: x.square().sum() + F.mse_loss(x, T), MEAN_IN_SUM),
    "of each step": (
        lambda x: added([x[:, 0].mean(), x[:3, 1].mean(), x[:3, 2].mean()]),
        MEAN_IN_SUM,
    ),
    "sum": (lambda x: x.square().sum(), None),
    "sum of means": (lambda x: x.square().mean(1).sum(), None),
    "one a sample": (lambda x: added(of_each(x)), None),
    "mean times its number": (lambda x: F.mse_loss(x, T) * len(x), None),
    "divided by a number that is not": (lambda x: x.square().sum() / 17, None),
    "penalty": (lambda x: x.square().sum() + P.square().mean(), PENALTY_IN_SUM),
    "norm of weights": (lambda x: x.square().sum() + P.norm(), PENALTY_IN_SUM),
    "penalty alone": (lambda x: P.square().sum() + Q.square().sum(), PENALTY_IN_SUM),
    "of a layer": (lambda x: (x @ torch.ones(5, 7) @ P).square().sum(), None),
}


@pytest.mark.parametrize("name", OF_SUMS)
def test_a_mean_among_losses_that_are_added_up_is_noted(name: str) -> None:
    make, expected = OF_SUMS[name]
    loss = make(X.clone().requires_grad_())
    assert LossWatch(is_sum=True).look(loss, 4, 1) == expected


@pytest.mark.parametrize("number", [1, 2])
def test_a_penalty_beside_the_sum_of_few_samples_is_noted(number: int) -> None:
    x = X[:number].clone().requires_grad_()
    watch = LossWatch(is_sum=True)
    assert watch.look(x.square().sum(), number, 1) is None
    loss = x.square().sum() + P.square().sum()
    assert watch.look(loss, number, 2) == PENALTY_IN_SUM


def test_means_over_the_samples_left_at_each_of_as_many_steps_are_no_sum() -> None:
    x = X.clone().requires_grad_() * T
    left = torch.arange(4)[:, None] >= torch.arange(4) - 1
    means = [x[:, t].masked_select(left[:, t]).mean() for t in range(4)]
    assert LossWatch().look(added(means), 4, 1) == UNEVEN


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="old versions do not say what hooks keep"
)
def test_a_checkpointed_loss_is_left_to_its_backward_pass() -> None:
    x = X.clone().requires_grad_()
    loss = checkpoint(lambda x: F.cross_entropy(x, PARTLY), x, use_reentrant=False)
    assert LossWatch().look(loss, 4, 1) is None
    loss.backward()  # torch gives each saved tensor once
    assert x.grad is not None


@pytest.mark.parametrize("number", [1, 2])
def test_a_weight_is_no_division_by_one_or_two_samples(number: int) -> None:
    x = X[:number].clone().requires_grad_()
    loss = (1 / number * (x * 1.0 - T[:number]).square()).sum()
    assert LossWatch().look(loss, number, 1) == SUM


@pytest.mark.parametrize("number", [1, 2])
def test_a_last_batch_of_one_or_two_samples_is_as_those_before(number: int) -> None:
    x = X.clone().requires_grad_()

    def mean(x: Tensor) -> Tensor:
        return (1 / len(x) * F.mse_loss(x, T[: len(x)], reduction="none")).sum()

    watch = LossWatch()
    assert watch.look(mean(x), 4, 1) is None
    assert watch.look(mean(x[:number]), number, 2) is None
    watch.begin_pass()
    assert watch.look(x[:number].square().mean(1).sum(), number, 3) is None
    assert watch.look(x.square().mean(1).sum(), 4, 4) == SUM


def test_the_losses_of_many_samples_are_seen_to_be_a_sum() -> None:
    x = torch.randn(512, 3, requires_grad=True)
    loss = added([x[i].square().mean() for i in range(512)])
    assert LossWatch().look(loss, 512, 1) == SUM


def test_a_graph_without_end_is_not_walked_to_its_end() -> None:
    x = X.clone().requires_grad_()
    assert LossWatch().look(added([x.mean()] * 10_000), 4, 1) is None


def test_a_mean_over_data_of_another_number_is_not_noted_beside_one() -> None:
    watch = LossWatch()
    x, points = X.clone().requires_grad_(), torch.randn(7, 5, requires_grad=True)
    for microbatch, n in enumerate((4, 4, 2), start=1):
        loss = F.mse_loss(x[:n], T[:n]) + points.square().mean()
        assert watch.look(loss, n, microbatch) is None


def test_means_over_lengths_that_differ_are_noted() -> None:
    watch = LossWatch()
    x = X.clone().requires_grad_()
    assert watch.look(x[:, :3].mean(), 4, 1) is None
    assert watch.look(x[:2, :3].mean(), 2, 2) is None
    assert watch.look(x[:2, :4].mean(), 2, 3) == UNEVEN


def test_a_count_that_is_that_of_the_samples_in_one_batch_alone_is_no_mean() -> None:
    def masked(counts: list[int]) -> torch.Tensor:
        mask = torch.arange(x.shape[1]) < torch.tensor(counts)[:, None]
        return (x[: len(counts)] * mask).sum() / mask.sum()

    x = torch.randn(4, 5, requires_grad=True)
    watch = LossWatch()
    assert watch.look(masked([1, 1, 1, 1]), 4, 1) is None
    assert watch.look(masked([1, 1]), 2, 2) is None
    assert watch.look(masked([3, 3]), 2, 3) == UNEVEN
    assert watch.look(masked([1, 1]), 2, 4) == UNEVEN


def test_several_losses_of_a_batch_are_compared_each_with_itself() -> None:
    watch = LossWatch()
    x = X.clone().requires_grad_()
    for microbatch in (1, 2):
        assert watch.look(x.mean(), 4, microbatch) is None
        assert watch.look(x[:, :3].mean(), 4, microbatch) is None


def test_images_that_grow_from_pass_to_pass_are_no_uneven_samples() -> None:
    watch = LossWatch()
    for microbatch, size in enumerate((8, 12, 16), start=1):
        watch.begin_pass()
        x = torch.rand(4, size, requires_grad=True)
        loss = F.mse_loss(x * 2, torch.rand(4, size))
        assert watch.look(loss, 4, microbatch) is None


def test_a_look_ends_no_loop() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.expand(4, 5)

    x = X.clone().requires_grad_()
    assert LossWatch().look(Odd.apply(x) * torch.tensor(1j), 4, 1) is None
