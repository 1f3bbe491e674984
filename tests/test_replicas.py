"""What labkit says of ranks that differ where they should agree."""

import pytest
import torch
from marks import long_but

from labkit import Lab
from labkit import RankError
from labkit.notebook.runs.run import Run
from labkit.rank.telemetry.replica_fingerprints import ReplicaWatch
from labkit.strategies.model.fingerprints import fingerprints

CELL = """
import torch.nn.functional as F
from labkit.data import digits
from labkit.models import mlp

plain = model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, digits(), batch_size=64)
step = 0
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    {then}
"""


def train(lab: Lab, strategy: str, then: str = "pass", **options: int) -> Run:
    return lab.train(strategy, CELL.format(then=then), live=False, **options)


@pytest.mark.parametrize(
    "strategy",
    long_but(["single", "ddp", "zero1", "zero2", "fsdp"], "ddp", "zero2", "fsdp"),
)
def test_a_run_in_which_all_is_well_has_no_mismatch(lab: Lab, strategy: str) -> None:
    assert train(lab, strategy).mismatches == []
    assert train(lab, strategy, accumulate=3).mismatches == []


def test_a_parameter_that_one_rank_changes_is_named_with_the_step(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    change = "if rank == 1 and step == 14: plain[1].bias.data[3] += 1e-3"
    run = train(lab, "ddp", change)
    first, *_ = run.mismatches
    assert first.startswith(
        "rank 1's copy of 1.bias differs from that of rank 0 from step 15 on"
    )
    assert "Set it to the same on all ranks" in "".join(run.mismatches)
    assert f"labkit: {first}\n" in capsys.readouterr().err


def test_values_that_one_rank_has_in_other_places_are_found(lab: Lab) -> None:
    weight = "plain[1].weight.data"
    change = f"if rank == 1 and step == 14: {weight}[[0, 1]] = {weight}[[1, 0]]"
    first, *_ = train(lab, "ddp", change).mismatches
    assert first.startswith("rank 1's copy of 1.weight differs from that of rank 0")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_layer_that_each_rank_has_put_in_is_found(lab: Lab, strategy: str) -> None:
    put_in = "plain[-1] = torch.nn.Linear(64, 10)\nstep = 0\n"
    code = CELL.format(then="pass").replace("step = 0\n", put_in)
    first, *_ = lab.train(strategy, code, live=False).mismatches
    assert "copy of 3." in first
    assert "differs from that of rank 0" in first


def test_a_layer_that_the_loop_replaces_between_steps_is_explained(lab: Lab) -> None:
    with pytest.raises(RankError, match="a parameter that the model no longer has"):
        train(lab, "ddp", "plain[-1] = torch.nn.Linear(64, 10)")


def test_gradients_and_weights_of_which_a_step_takes_parts_are_compared(
    lab: Lab,
) -> None:
    scale = "for p in plain.parameters(): p.{} *= 1 + 0.01 * {}\n    "
    for strategy in ("zero2", "zero3"):
        for factor, expected in (("rank", 1), ("step", 0)):
            own = CELL.replace("optimizer.step()", scale.format("grad", factor) + "{}")
            run = lab.train(
                strategy, own.format("optimizer.step()", then=""), live=False
            )
            assert len(run.mismatches) == expected
    assert lab.runs[-2].mismatches[0].startswith("a gradient that the loop has set was")
    (found,) = train(lab, "zero3", scale.format("data", "rank")).mismatches
    assert found.startswith("a parameter was not the same on all ranks before a step")


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (251, 9)], ids=str)
def test_a_fingerprint_is_of_the_values_and_their_places(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # Less than 256, which is as far as bf16 tells whole numbers apart.
    values = (30 * torch.randn(shape)).clamp(-99, 99).to(dtype)
    # Also where they do not begin at a word of 8 bytes, or are not in a row.
    shifted = torch.cat([torch.ones(3, dtype=dtype), values.flatten()])[3:].view(shape)
    strided = torch.stack([values, values], dim=-1)[..., 0]
    one, *same = fingerprints([values, shifted, strided]).tolist()
    assert same == [one, one]
    if values.numel() > 1:
        found = {one}
        for place in (0, -1):
            changed = values.clone().flatten()
            changed[place] += 1
            found.add(int(fingerprints([changed])))
        found.add(int(fingerprints([values.flatten().roll(1)])))
        assert len(found) == 4


def test_the_same_random_numbers_on_every_rank_are_reported(lab: Lab) -> None:
    [only] = train(lab, "ddp", "torch.manual_seed(0)").mismatches
    assert only.startswith("ranks 0-1 draw the same random numbers")


def test_a_cell_that_prepares_nothing_is_not_compared(lab: Lab) -> None:
    assert lab.train("ddp", "print(rank)", live=False).mismatches == []


def test_samples_that_are_dealt_twice_are_reported(lab: Lab) -> None:
    cheat = 'object.__setattr__(loader.batches.dealer.peers, "rank", 0)'
    [only] = train(lab, "zero2", cheat).mismatches
    assert "drew some samples twice" in only or "samples together" in only


LEAVES_A_PASS = """
x = torch.arange(32.0).reshape(32, 1) / 32
data = torch.utils.data.TensorDataset(x, x)
model = torch.nn.Linear(1, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, sgd, data, batch_size=8, shuffle=False)
for epoch in range(2):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if {leaves}:
            break
"""


def test_passes_that_ranks_leave_at_other_batches_are_reported(lab: Lab) -> None:
    # Each leaves one of its passes, at the same batch: all take as many steps.
    leaves = "x[0, 0] == (0.25, 0.375)[rank] and epoch == rank"
    run = lab.train("ddp", LEAVES_A_PASS.format(leaves=leaves), live=False)
    [found] = [each for each in run.mismatches if "different passes" in each]
    assert "Make the same decision on all ranks" in found
    assert not any("drew some samples twice" in each for each in run.mismatches)


TEXTBOOK = """
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from labkit.data import digits
from labkit.models import mlp

model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = {sampler}
for epoch in range(2):
    for x, y in DataLoader(digits(), batch_size=64, sampler=sampler):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_textbook_cell_without_a_distributed_sampler_is_reported(lab: Lab) -> None:
    run = lab.train("raw", TEXTBOOK.format(sampler="None"), live=False)
    [only] = run.mismatches
    assert only.startswith("ranks 0-1 each drew all 1438 samples")


def test_a_textbook_cell_with_one_is_not(lab: Lab) -> None:
    code = TEXTBOOK.format(sampler="DistributedSampler(digits())")
    assert lab.train("raw", code, live=False).mismatches == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_test_set_that_every_rank_draws_is_none_of_it(
    lab: Lab, num_workers: int
) -> None:
    code = (
        TEXTBOOK.format(sampler="DistributedSampler(digits())")
        + "    model.eval()\n"
        + "    for x, y in DataLoader(digits('test'), 64, num_workers=workers):\n"
        + "        with torch.no_grad():\n"
        + "            F.cross_entropy(model(x), y)\n"
        + "    model.train()\n"
    )
    lab.push(workers=num_workers)
    assert lab.train("raw", code, live=False).mismatches == []


def test_what_workers_draw_ahead_of_the_backward_pass_counts(lab: Lab) -> None:
    code = TEXTBOOK.format(sampler="None").replace("=64,", "=1024, num_workers=1,")
    [only] = lab.train("raw", code, live=False).mismatches
    assert only.startswith("ranks 0-1 each drew all 1438 samples")


OWN_LOADER = """
import torch.nn.functional as F
from torch.utils.data import DataLoader
from labkit.data import digits
from labkit.models import mlp

model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = DataLoader(digits(), batch_size=64, shuffle=True)
model, optimizer, loader = prepare(model, optimizer, mine)
for x, y in {loader}:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in DataLoader(digits("test"), batch_size=64):
        pass
"""


@pytest.mark.parametrize("loader", ["mine", "loader", "zipped"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_loop_that_forgets_the_loader_of_prepare_is_reported(
    lab: Lab, strategy: str, loader: str
) -> None:
    zipped = "(batch for _, batch in zip(loader, mine))"  # two datasets in one loop
    code = OWN_LOADER.format(loader={"zipped": zipped}.get(loader, loader))
    run = lab.train(strategy, code, live=False)
    # Under pipeline all ranks are to have the same batches.
    if loader != "mine" or strategy == "pipeline":
        assert run.mismatches == []
    else:
        [only] = run.mismatches
        assert only.startswith("ranks 0-1 each drew all 1438 samples")
        assert "none from the loader that prepare returned" in only


PARTS_BY_HAND = """
import psutil
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset
from labkit.data import digits
from labkit.models import mlp

whole = digits()
images, labels = whole.tensors
end = len(whole) // world_size * world_size

class Named:  # without a length
    def __getitem__(self, name):
        return whole[int(str(name).removeprefix("sample"))]

class Names(Sampler):
    def __init__(self, kind):
        self.kind = kind
    def __iter__(self):
        return map(self.kind, range(128))
    def __len__(self):
        return 128

class Endless(Named):
    def __len__(self):
        return 10**12

def loaders():
    yield DataLoader(Subset(whole, range(rank, end, world_size)), 64)
    yield DataLoader(TensorDataset(images[rank:end:2], labels[rank:end:2]), 64)
    yield DataLoader([whole[i] for i in range(rank, end, world_size)], 64)
    yield DataLoader(Named(), 64, sampler=Names("sample{}".format))
    yield DataLoader(Named(), 64, sampler=Names(int))
    yield DataLoader(Endless(), 64, sampler=Names(int))

model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, _ = prepare(model, optimizer, whole, batch_size=64)

def train(x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

for own in loaders():
    for x, y in own:
        train(x, y)
for _ in range(3):
    train(*next(iter(DataLoader(whole, 64, num_workers=1))))
log(workers=len(psutil.Process().children()))
"""


def test_a_loop_that_deals_out_its_data_by_hand_is_not(lab: Lab) -> None:
    run = lab.train("ddp", PARTS_BY_HAND, live=False)
    assert run.mismatches == []
    assert run.history["workers"].max() <= 1


def test_many_tensors_are_compared_more_rarely() -> None:
    watch = ReplicaWatch()
    replicas = {f"{number}.weight": torch.ones(2) for number in range(50)}
    for step in range(1, 13):
        if watch.is_due(step):
            watch.check(step, replicas)
    assert watch.notes(12).steps[1:] == [4, 8, 12]
