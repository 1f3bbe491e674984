"""Data of every kind on real ranks: the reference is one process in plain PyTorch."""

import re
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from marks import in_suites
from marks import release_but
from torch.utils.data import Dataset
from torch.utils.data import Subset

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run
from labkit.rank.data.loader import LOADED_AHEAD
from labkit.rank.data.loader import TWICE_AT_ONCE
from labkit.rank.data.orders import fingerprint_of
from labkit.rank.loop.step_data import DRAWN_BEFORE
from labkit.rank.loss.kind import SUM
from labkit.rank.training.notes import OWN_STATISTICS
from labkit.rank.training.notes import TRAINED_ON_SHARE

pytestmark = pytest.mark.timeout(120)

STRATEGIES = ["single", "ddp", "zero2", "fsdp"]

# 22 samples: the batches of 5 leave one of 2; of its microbatches one rank has none.
SETUP = """
import random
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *

numbers = torch.Generator().manual_seed(1)
x = torch.randn(22, 6, generator=numbers)
y = torch.randint(0, 4, (22,), generator=numbers)
data = TensorDataset(x, y)

class Rows(Dataset):
    def __len__(self): return 22
    def __getitem__(self, i): return x[i], y[i]

class Stream(IterableDataset):
    def __iter__(self): return ((x[i], y[i]) for i in range(22))

class Buckets(Sampler):
    def __iter__(self): return iter([[5, 1], [0, 2, 4, 6, 7, 21], [3], [9, 8, 11]])
    def __len__(self): return 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
seeded = torch.Generator().manual_seed(3)
"""

LOADERS = {
    "replacement": """DataLoader(data, 5, sampler=RandomSampler(
        data, replacement=True, num_samples=12, generator=seeded))""",
    "generator": "DataLoader(Rows(), 5, shuffle=True, generator=seeded)",
    "weighted": """DataLoader(Rows(), 5, sampler=WeightedRandomSampler(
        [1.0 + i for i in range(22)], 14, generator=seeded))""",
    "buckets": "DataLoader(Rows(), batch_sampler=Buckets())",
    "stream": "DataLoader(Stream(), 5)",
    "workers": "DataLoader(Stream(), 5, num_workers=1)",
}

LOOP = """
for epoch in range(2):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def train(lab: Lab, strategy: str, code: str, **options: Any) -> Run:
    return lab.train(strategy, textwrap.dedent(code), live=False, **options)


def plain(code: str) -> dict[str, Any]:
    """The variables of a cell that ran here, in one process."""
    variables: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(code), variables)
    return variables


def assert_same_weights(lab: Lab, variables: dict[str, Any]) -> None:
    found = lab.pull("model", full=True)
    expected = variables["model"].state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


GROWING = """
class Pairs(Dataset):
    def __init__(self): self.pairs = [(x[i], y[i]) for i in range(8)]
    def __len__(self): return len(self.pairs)
    def __getitem__(self, i): return self.pairs[i]

pairs = Pairs()
model, optimizer, loader = prepare(model, optimizer, DataLoader(pairs, 4))
for epoch in range(3):
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    GROW
"""


@pytest.mark.parametrize(
    ("strategy", "grow"),
    [
        ("ddp", "pairs.pairs += [(x[8 + epoch + rank], y[8])]"),
        ("ddp", "pairs.pairs += [(x[8], y[8])] * (1 - rank)"),
        ("tensor", "pairs.pairs += [(x[8 + epoch + rank], y[8])]"),
        ("pipeline", "pairs.pairs += [(x[8], y[8])] * (1 - rank)"),
    ],
    ids=["by other samples", "on one rank", "of one batch", "of one batch, on one"],
)
def test_a_dataset_that_grows_is_the_same_on_all_ranks(
    lab: Lab, strategy: str, grow: str
) -> None:
    """Also on ranks that have the same samples for other parts of the model."""
    match = "has 9 samples, and had 8 before, and another rank has got others"
    with pytest.raises(RankError, match=match):
        lab.train(strategy, SETUP + GROWING.replace("GROW", grow), live=False)


@pytest.mark.parametrize("strategy", in_suites(STRATEGIES, test=["zero2"]))
@pytest.mark.parametrize("kind", LOADERS)
def test_any_sampler_gives_what_one_process_gives(
    lab: Lab, kind: str, strategy: str
) -> None:
    data = f"data = {LOADERS[kind]}\n"
    prepare = "model, optimizer, loader = prepare(model, optimizer, data)\n"
    expected = plain(SETUP + data + "loader = data\n" + LOOP)
    for accumulate in (1, 2):
        run = train(lab, strategy, SETUP + data + prepare + LOOP, accumulate=accumulate)
        assert_same_weights(lab, expected)
        assert not run.mismatches
    assert run.last_loss == pytest.approx(float(expected["loss"].detach()), rel=1e-4)


def test_a_shuffled_set_that_drops_its_last_batch_is_no_mismatch(lab: Lab) -> None:
    code = "data = DataLoader(data, 5, shuffle=True, drop_last=True)\n"
    prepare = "model, optimizer, loader = prepare(model, optimizer, data)\n"
    run = train(lab, "ddp", SETUP + code + prepare + LOOP)
    assert run.num_steps == 8
    assert not run.mismatches


REFUSED = {
    "DataLoader(data, 4, sampler=DistributedSampler(data))": "a DistributedSampler",
    "DataLoader(data, 4, sampler=range(rank, 22, 2))": "range does not draw the same",
    "DataLoader(data, 4, shuffle=True, generator=seeded.manual_seed(rank))": (
        "RandomSampler does not draw the same samples on every rank"
    ),
    "DataLoader(Subset(data, range(rank, 22, 2)), 4)": "is not the same on every rank",
    "DataLoader(TensorDataset(x[rank::2], y[rank::2]), 4)": "is not the same on every",
    "DataLoader([(a + rank, b) for a, b in data], 4)": "is not the same on every rank",
    "DataLoader(ConcatDataset([data, Files()]), 4)": "is not the same on every rank",
    "DataLoader(Sharded(), 4)": "Sharded does not yield the same samples on every rank",
    "DataLoader(Ragged(), 4)": "from batch 2 of the epoch on",
    "DataLoader(Ragged(), 4, num_workers=1)": "from batch 2 of the epoch on",
}


class OfFiles(Dataset[Any]):
    """As on a host that has them in `folder`, and keeps what it has loaded."""

    def __init__(self, folder: str, *, names: str = "abc") -> None:
        self.samples = [(f"{folder}/{name}.png", 0) for name in names]
        self.loaded: list[str | None] = [None] * len(names)
        self.counts = np.zeros(len(names))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> str:
        self.loaded[index] = "image"
        self.counts[index] += 1
        return "image"


def test_the_same_files_in_other_folders_are_the_same_data() -> None:
    one, other = OfFiles("/a"), OfFiles("/b/c")
    one[0]
    assert fingerprint_of(one) == fingerprint_of(other)
    assert fingerprint_of(one) != fingerprint_of(OfFiles("/a", names="cba"))


class WithoutLength(Dataset[Any]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_part_of_what_has_no_length_has_one() -> None:
    one, other = (Subset(WithoutLength(), [0, last]) for last in (1, 2))
    assert fingerprint_of(one) != fingerprint_of(other)


@pytest.mark.parametrize("source", REFUSED)
def test_data_that_ranks_share_already_is_refused(lab: Lab, source: str) -> None:
    streams = """
from torch.utils.data import ConcatDataset

class Files(torch.utils.data.Dataset):
    def __init__(self): self.files = ["b.png a.png", "a.png b.png"][rank].split()
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return x[i], y[i]

class Sharded(IterableDataset):
    def __iter__(self): return ((x[i], y[i]) for i in range(rank, 22, 2))

class Ragged(IterableDataset):
    def __iter__(self): return ((x[i], y[i]) for i in range(4 + 8 * rank))
"""
    code = f"""
model, optimizer, loader = prepare(model, optimizer, {source})
for a, b in loader:
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
"""
    with pytest.raises(RankError, match="UnsupportedLoopError") as caught:
        train(lab, "ddp", SETUP + streams + code)
    assert REFUSED[source] in " ".join(str(caught.value).split())
    lab.run("dist.barrier()")  # the ranks are as they were


# ---- a loss that is no mean over samples ----

MASKED = """
y[::3] = -100
y[20:] = torch.tensor([1, -100])  # the last batch: one rank has nothing that counts
"""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", release_but(STRATEGIES, "ddp"))
def test_a_mean_over_some_targets_is_that_of_the_global_batch(
    lab: Lab, strategy: str, accumulate: int
) -> None:
    prepare = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=5, shuffle=False,
    weigh=lambda batch: (batch[1] != -100).sum(),
)
"""
    expected = plain(
        SETUP + MASKED + "losses = []\nloader = DataLoader(data, 5)\n" + LOOP
    )
    run = train(lab, strategy, SETUP + MASKED + prepare + LOOP, accumulate=accumulate)
    assert_same_weights(lab, expected)
    assert run.last_loss == pytest.approx(float(expected["loss"].detach()), rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", release_but(STRATEGIES, "fsdp"))
def test_a_sum_over_samples_is_that_of_the_global_batch(
    lab: Lab, strategy: str, accumulate: int
) -> None:
    prepare = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=5, shuffle=False, reduction="sum"
)
"""
    loop = LOOP.replace("(a), b)", '(a), b, reduction="sum")')
    expected = plain(SETUP + "loader = DataLoader(data, 5)\n" + loop)
    run = train(lab, strategy, SETUP + prepare + loop, accumulate=accumulate)
    assert_same_weights(lab, expected)
    assert run.last_loss == pytest.approx(float(expected["loss"].detach()), rel=1e-4)


AHEAD = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=5, weigh=lambda batch: (batch[1] > 0).sum()
)
kept = []
for number, (a, b) in enumerate(loader):
    if number == 1:
        continue
    kept.append(F.cross_entropy(model(a), b))
    if len(kept) == SIZE:
        torch.stack(kept).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.clear()
"""


@pytest.mark.parametrize(("size", "num_notes"), [(1, 0), (2, 1)])
def test_a_batch_that_is_left_out_is_none_that_was_drawn_before(
    lab: Lab, size: int, num_notes: int
) -> None:
    run = train(lab, "ddp", SETUP + AHEAD.replace("SIZE", str(size)))
    assert [DRAWN_BEFORE] * num_notes == run.notes


SKIPPED_PART = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(x, y)

model, optimizer, loader = prepare(model, optimizer, DATA)
for number, (a, b) in enumerate(loader):
    if number % 2:
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "given",
    [
        "data, batch_size=5, weigh=lambda batch: (batch[1] > 0).sum() + 1",
        "Stream(), batch_size=5",
    ],
)
def test_a_microbatch_that_is_left_out_is_none_that_was_drawn_before(
    lab: Lab, given: str
) -> None:
    code = SETUP + SKIPPED_PART.replace("DATA", given)
    run = train(lab, "ddp", code, accumulate=2)
    assert DRAWN_BEFORE not in run.notes


PREFETCHED = """
x[:, 0] = 0
x[6, 0] = 3
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=2, weigh=WEIGH, shuffle=False
)
batches = iter(loader)
now = next(batches)
while now is not None:
    later = next(batches, None)
    if later is not None:
        F.cross_entropy(model(now[0]), now[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    now = later
"""


@pytest.mark.parametrize(
    ("weigh", "num_notes"),
    [("lambda batch: 1", 0), ("lambda batch: 1 + batch[0][0, 0]", 1)],
)
def test_a_prefetcher_is_noted_in_the_midst_of_a_pass(
    lab: Lab, weigh: str, num_notes: int
) -> None:
    run = train(lab, "ddp", SETUP + PREFETCHED.replace("WEIGH", weigh))
    assert [DRAWN_BEFORE] * num_notes == run.notes


KEPT = """
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=5, weigh=lambda batch: (batch[1] > 0).sum()
)
batches = iter(loader)
now, seen = next(batches), []
while (later := next(batches, None)) is not None:
    a, b = TRAINED
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(now)
    now = later
"""


@pytest.mark.parametrize(("trained", "num_notes"), [("later", 0), ("now", 1)])
def test_a_batch_that_a_loop_keeps_is_noted_where_it_trains_with_it_later(
    lab: Lab, trained: str, num_notes: int
) -> None:
    run = train(lab, "ddp", SETUP + KEPT.replace("TRAINED", trained))
    assert [DRAWN_BEFORE] * num_notes == run.notes


OF_OWN_CLASSES = """
@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def collate(samples):
    a, b = torch.utils.data.default_collate(samples)
    return CLASS(x=a, y=b)


def open_batch(batch):
    return (batch.x, batch.y) if isinstance(batch, Batch) else (batch["x"], batch["y"])


model, optimizer, loader = prepare(
    model,
    optimizer,
    DataLoader(data, batch_size=5, collate_fn=collate),
    weigh=lambda batch: (open_batch(batch)[1] > 0).sum(),
)
batches = iter(loader)
while two := list(itertools.islice(batches, 2)):
    for a, b in map(open_batch, two):
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
    del a, b
"""


@pytest.mark.parametrize("kind", ["collections.UserDict", "Batch"])
def test_batches_of_other_classes_that_were_drawn_before_are_noted(
    lab: Lab, kind: str
) -> None:
    setup = SETUP + "import collections, dataclasses, itertools\n"
    run = train(lab, "ddp", setup + OF_OWN_CLASSES.replace("CLASS(", kind + "("))
    assert run.notes == [DRAWN_BEFORE]


TWICE = """
model, optimizer, loader = prepare(model, optimizer, DataLoader(OPTIONS), shuffle=True)
for (a, b), (c, _) in zip(loader, loader):
    F.cross_entropy(model(a) + model(c), b).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_two_passes_at_once_are_noted_where_their_order_is_another(lab: Lab) -> None:
    code = SETUP + TWICE.replace("OPTIONS", "data, 4, shuffle=True, GENERATOR")
    run = train(lab, "ddp", code.replace("GENERATOR", "generator=seeded"))
    assert TWICE_AT_ONCE in run.notes
    assert not run.mismatches
    run = train(lab, "ddp", code.replace("GENERATOR", ""))
    assert not [*run.notes, *run.mismatches]
    with pytest.raises(RankError, match=re.escape(LOADED_AHEAD)):
        train(lab, "ddp", code.replace("GENERATOR", "num_workers=1"))


WRONG = {
    "weigh=3": "weigh is 3; give a function of a batch",
    "reduction='max'": "unknown reduction 'max'; choose one of: mean, sum",
    "reduction='sum', weigh=len": "leave out one of the two",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_weights_are_explained(lab: Lab, options: str) -> None:
    with pytest.raises(RankError) as caught:
        train(lab, "ddp", SETUP + f"prepare(model, optimizer, data, {options})")
    assert WRONG[options] in str(caught.value)


@pytest.mark.parametrize("strategy", release_but(["ddp", "zero2", "fsdp"], "zero2"))
def test_workers_end_with_their_loader_and_not_with_the_garbage(
    lab: Lab, strategy: str
) -> None:
    """As a part of a cycle they would be waited for in vain, 5 s each."""
    prepare = """
source = DataLoader(data, 5, num_workers=1, persistent_workers=True)
model, optimizer, loader = prepare(model, optimizer, source)
"""
    train(lab, strategy, SETUP + prepare + LOOP)
    lab.run("""
import gc
import multiprocessing
gc.disable()
before = len(multiprocessing.active_children())
del source, loader
num_workers = before, len(multiprocessing.active_children())
gc.enable()
""")
    assert lab.pull("num_workers", "all") == [(1, 0)] * 2


# ---- BatchNorm ----

# The last batch, of one sample, leaves the last rank without one.
NORM = SETUP.replace("nn.Tanh()", "nn.BatchNorm1d(8)").replace("22", "{num_samples}")


@pytest.mark.parametrize("strategy", release_but(["ddp", "zero2", "fsdp"], "zero2"))
def test_a_stand_in_stays_out_of_batchnorm(lab: Lab, strategy: str) -> None:
    prepare = """
norm = model[1]
model, optimizer, loader = prepare(model, optimizer, data, batch_size=5, shuffle=False)
seen = []
for a, b in loader:
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append((norm.num_batches_tracked.item(), norm.running_mean.clone()))
"""
    code = NORM.format(num_samples=7)
    train(lab, strategy, code + prepare)
    # The last batch has 2 samples, too few for two parts with a variance.
    first, second = lab.pull("seen", [0, 1])
    assert [count for count, _ in first] == [1, 2]
    if strategy == "ddp":  # the statistics are those of rank 0, which always has a part
        assert [count for count, _ in second] == [1, 2]
        assert torch.equal(second[1][1], first[1][1])
    else:
        assert [count for count, _ in second] == [1, 1]
        assert torch.equal(second[1][1], second[0][1])


def test_a_batchnorm_with_a_forward_of_its_own_keeps_it(lab: Lab) -> None:
    own = SETUP.replace(
        "torch.manual_seed(0)",
        """
class WithActivation(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()
torch.manual_seed(0)
""",
    ).replace("nn.Tanh()", "WithActivation(8)")
    prepare = (
        "model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)\n"
    )
    run = train(
        lab, "ddp", own + "norm = model[1]\n" + prepare + LOOP, precision="bf16"
    )
    lab.run("kept = type(norm).__name__")
    assert lab.pull("kept") == "WithActivation"
    assert any("WithActivation has a forward of its own" in note for note in run.notes)
    with pytest.raises(RankError, match="WithActivation has a forward of its own"):
        train(lab, "ddp", own + prepare + LOOP, sync_batchnorm=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_syncbatchnorm_has_the_statistics_of_all_ranks(
    lab: Lab, precision: str
) -> None:
    norm = SETUP.replace("nn.Tanh()", "nn.{norm}(8)")
    prepare = "model, optimizer, loader = prepare(model, optimizer, data, {given})\n"
    given = prepare.format(given="batch_size=5, shuffle=False")
    code = norm.replace("{norm}", "SyncBatchNorm") + given + LOOP
    train(lab, "ddp", code, precision=precision)
    found = lab.pull("model", full=True)
    code = norm.replace("{norm}", "BatchNorm1d") + "loader = DataLoader(data, 5)\n"
    expected = plain(code + LOOP)["model"].state_dict()
    atol = 1e-6 if precision == "fp32" else 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


BESIDE = """
import copy
beside = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
model = copy.deepcopy(beside)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
other = OTHER
for a, b in DataLoader(data, 8):
    other(a)
for a, b in loader:
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        other(a)
"""


def test_a_batchnorm_beside_the_model_has_statistics_of_its_rank(lab: Lab) -> None:
    code = SETUP + BESIDE.replace("OTHER", "beside")
    assert train(lab, "ddp", code, sync_batchnorm=True).notes == [OWN_STATISTICS]
    code = SETUP + BESIDE.replace("OTHER", "copy.deepcopy(model)")
    assert not train(lab, "ddp", code, sync_batchnorm=True).notes


# ---- evaluation in a loop of one's own ----


@pytest.mark.parametrize(
    "strategy", release_but(["single", "ddp", "zero3", "fsdp"], "fsdp")
)
def test_a_shared_evaluation_counts_every_sample_once(lab: Lab, strategy: str) -> None:
    code = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
model.eval()
found = torch.zeros(2, dtype=torch.float64)
with torch.no_grad():
    for a, b in loader.share(Subset(data, range(13)), batch_size=4):
        found[0] += F.cross_entropy(model(a), b, reduction="sum").item()
        found[1] += len(b)
dist.all_reduce(found)
log(val_loss=found[0] / found[1])
"""
    run = train(lab, strategy, SETUP + code)
    expected = plain(SETUP + "loss = F.cross_entropy(model(x[:13]), y[:13])\n")
    for _, rows in run.history.groupby("rank"):
        found = rows["val_loss"].dropna()
        np.testing.assert_allclose(found, expected["loss"].item(), rtol=1e-5)


ATTACKED = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for a, b in loader:
    noise = torch.zeros_like(a).requires_grad_()
    attack = torch.optim.SGD([noise], lr=0.1)
    (-F.cross_entropy(model(a + noise), b, reduction="sum")).backward()
    attack.step()
    ZEROED.zero_grad()
    F.cross_entropy(model(a + noise.detach()), b).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BY_HAND = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for a, b in loader:
    F.cross_entropy(model(a), b, reduction="sum").backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("strategy", release_but(["ddp", "zero1", "fsdp"], "ddp"))
def test_a_loss_is_noted_where_its_gradients_are_used(lab: Lab, strategy: str) -> None:
    for zeroed in ("optimizer", "model"):
        run = train(lab, strategy, SETUP + ATTACKED.replace("ZEROED", zeroed))
        assert not run.notes
    run = train(lab, strategy, SETUP + ATTACKED.replace("ZEROED", "attack"))
    assert run.notes == [SUM]
    assert SUM in train(lab, "ddp", SETUP + BY_HAND).notes


OTHER = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
other = loader.share(Subset(data, range(12)), batch_size=4)
for (a, b), (c, _) in LOADERS:
    loss = F.cross_entropy(model(a), b) + model(c).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for a, b in EVALUATED:
        c = F.cross_entropy(model(a), b)
"""


@pytest.mark.parametrize("strategy", release_but(["ddp", "zero1", "fsdp"], "ddp"))
def test_training_on_a_share_is_noted_and_an_evaluation_is_not(
    lab: Lab, strategy: str
) -> None:
    evaluated = OTHER.replace("LOADERS", "zip(loader, DataLoader(data, 4))")
    run = train(lab, strategy, SETUP + evaluated.replace("EVALUATED", "other"))
    assert not run.notes
    trained = OTHER.replace("LOADERS", "zip(loader, other)").replace("EVALUATED", "()")
    assert train(lab, strategy, SETUP + trained).notes == [TRAINED_ON_SHARE]
    assert not train(lab, "single", SETUP + trained).notes


# ---- fit ----

FITTED = {
    "mapping": (
        """
class Named(Dataset):
    def __len__(self): return 22
    def __getitem__(self, i): return {"x": x[i], "labels": y[i]}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.linear(x), labels)}
data, model = Named(), Model()
""",
        'lambda output: output["loss"]',
        'model(**batch)["loss"]',
    ),
    "mapping and target": (
        """
class Named(Dataset):
    def __len__(self): return 22
    def __getitem__(self, i): return {"x": x[i], "labels": y[i]}
class Model(nn.Linear):
    def forward(self, x, **others):
        return super().forward(x)
data, model = Named(), Model(6, 4)
""",
        'lambda output, batch: F.cross_entropy(output, batch["labels"])',
        'F.cross_entropy(model(**batch), batch["labels"])',
    ),
    "three tensors": (
        """
class Model(nn.Linear):
    def forward(self, a, b):
        return super().forward(a * b)
data, model = TensorDataset(x, x + 1, y), Model(6, 4)
""",
        "F.cross_entropy",
        "F.cross_entropy(model(batch[0], batch[1]), batch[2])",
    ),
    "inputs alone": (
        "data, model = TensorDataset(x), nn.Linear(6, 6)\n",
        "nn.MSELoss()",
        "F.mse_loss(model(batch[0]), batch[0])",
    ),
}


@pytest.mark.parametrize("strategy", release_but(["ddp", "fsdp"], "fsdp"))
@pytest.mark.parametrize("kind", FITTED)
def test_fit_takes_batches_of_any_kind(lab: Lab, kind: str, strategy: str) -> None:
    setup, loss_fn, loss = FITTED[kind]
    setup = SETUP + setup
    setup += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    expected = plain(f"""{setup}
for epoch in range(2):
    for batch in DataLoader(data, 5):
        loss = {loss}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
batch = next(iter(DataLoader(data, 22)))
val_loss = float({loss})
""")
    run = train(
        lab,
        strategy,
        f"""{setup}
fit(
    model, data, {loss_fn}, optimizer=optimizer, batch_size=5, epochs=2,
    shuffle=False, validate=data,
)
""",
    )
    assert_same_weights(lab, expected)
    found = run.history["val_loss"].dropna()
    np.testing.assert_allclose(list(found)[-1], expected["val_loss"], rtol=1e-4)


# ---- notes ----

NOTED = {
    "F.cross_entropy(model(a), b)": None,
    "F.cross_entropy(model(a), b.masked_fill(a[:, 0] > 0, -100))": "weigh=lambda batch",
    "F.cross_entropy(model(a), b, reduction='sum')": 'prepare(..., reduction="sum")',
}


@pytest.mark.parametrize("loss", NOTED)
def test_a_loss_that_is_no_mean_over_samples_is_noted(lab: Lab, loss: str) -> None:
    prepare = "model, optimizer, loader = prepare(model, optimizer, data, {options})\n"
    loop = LOOP.replace("F.cross_entropy(model(a), b)", loss)
    run = train(lab, "ddp", SETUP + prepare.format(options="batch_size=8") + loop)
    if NOTED[loss] is None:
        assert run.notes == []
        return
    [note] = run.notes
    assert NOTED[loss] in note
    for option in ("reduction='sum'", "weigh=len"):
        options = f"batch_size=8, {option}"
        run = train(lab, "ddp", SETUP + prepare.format(options=options) + loop)
        is_mean_in_sum = "sum" in option and "sum" not in loss
        found = ["has a mean over" in note for note in run.notes]
        assert found == [True] * is_mean_in_sum
    run = train(lab, "single", SETUP + prepare.format(options="batch_size=8") + loop)
    assert run.notes == []
