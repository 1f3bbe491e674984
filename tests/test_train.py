"""Training runs on a real cluster; the reference is one process on the same batches."""

import textwrap
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import long_but
from test_strategies import global_losses
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.compat.torch import all_gather_with_gradients
from labkit.data import digits

Captured = pytest.CaptureFixture[str]

PLAIN_LOOP = """
import torch.nn.functional as F
from torch import nn
from labkit.data import digits

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
wrapped, optimizer, loader = prepare(
    model, optimizer, digits(), batch_size={batch_size}, shuffle={shuffle}
)
for epoch in range({epochs}):
    for x, y in loader:
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def train(lab: Lab, strategy: str, code: str, **options: Any) -> Any:
    return lab.train(strategy, textwrap.dedent(code), live=False, **options)


def reference(batch_size: int, epochs: int, seed: int = 0) -> tuple[nn.Module, list]:
    """One process on the same global batches, in plain PyTorch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = digits().tensors
    losses = []
    for _ in range(epochs):
        for start in range(0, len(images), batch_size):
            batch = slice(start, start + batch_size)
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


# 1438 training samples: 64 leaves a last batch of 30, 719 none, 1437 one of a single
# sample, of which one rank has no part.
@pytest.mark.parametrize("batch_size", long_but([64, 719, 1437], 719))
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_losses_and_weights_equal_one_process(
    lab: Lab, strategy: str, batch_size: int
) -> None:
    code = PLAIN_LOOP.format(batch_size=batch_size, shuffle=False, epochs=2)
    run = train(lab, strategy, code)
    model, losses = reference(batch_size, epochs=2)
    np.testing.assert_allclose(global_losses(run), losses, rtol=2e-5)
    weights = lab.pull("model", full=True)
    torch.testing.assert_close(weights, model.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.release
def test_an_odd_number_of_ranks_gives_the_weights_of_one_process() -> None:
    with Lab(num_ranks=3, group_timeout_s=30) as lab:
        code = PLAIN_LOOP.format(batch_size=100, shuffle=False, epochs=1)
        run = train(lab, "ddp", code)
        model, losses = reference(100, epochs=1)
        np.testing.assert_allclose(global_losses(run), losses, rtol=2e-5)
        for weights in lab.pull("model", [0, 1, 2], full=True):
            torch.testing.assert_close(
                weights, model.state_dict(), rtol=1e-4, atol=1e-6
            )


def test_shuffled_batches_are_the_same_under_every_strategy(lab: Lab) -> None:
    code = PLAIN_LOOP.format(batch_size=64, shuffle=True, epochs=2)
    runs = {name: train(lab, name, code) for name in ("single", "ddp")}
    np.testing.assert_allclose(
        global_losses(runs["ddp"]), global_losses(runs["single"]), rtol=2e-5
    )


def test_the_seed_of_the_magic_line_decides_the_run(lab: Lab) -> None:
    code = PLAIN_LOOP.format(batch_size=719, shuffle=True, epochs=1)
    first = global_losses(train(lab, "ddp", code, seed=1))
    assert first.tolist() == global_losses(train(lab, "ddp", code, seed=1)).tolist()
    assert first.tolist() != global_losses(train(lab, "ddp", code, seed=2)).tolist()


def test_fit_is_the_same_loop_with_validation(lab: Lab) -> None:
    run = train(
        lab,
        "ddp",
        """
        import torch.nn.functional as F
        from torch import nn
        from labkit.data import digits
        def accuracy(output, y):
            return (output.argmax(1) == y).float().mean()
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        )
        fit(
            model, digits(), F.cross_entropy, batch_size=64, epochs=2, shuffle=False,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            validate=digits("test"), metrics={"accuracy": accuracy},
        )
        """,
    )
    model, losses = reference(64, epochs=2)
    np.testing.assert_allclose(global_losses(run), losses, rtol=2e-5)
    images, labels = digits("test").tensors
    with torch.no_grad():
        output = model(images)
    history = run.history
    last = history[history["step"] == 46]
    expected = F.cross_entropy(output, labels).item()
    assert last["val_loss"].tolist() == pytest.approx([expected] * 2, rel=1e-4)
    right = (output.argmax(1) == labels).float().mean().item()
    assert last["val_accuracy"].tolist() == pytest.approx([right] * 2, abs=3e-3)
    assert "epoch 2/2, step 46/46" in run.status_line()


def test_a_plain_loop_is_noticed_without_any_call_to_labkit(lab: Lab) -> None:
    run = train(
        lab,
        "raw",
        """
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = loss.item()
        """,
    )
    history = run.history
    assert history["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert history["rank"].tolist() == [0, 1] * 5
    assert history["loss"].iloc[-2:].tolist() == pytest.approx(lab.pull("seen", "all"))
    # The third step is measured, and known from the fourth on: two weights and a bias,
    # their gradients, what the step makes of 8 values.
    assert history["memory_bytes"].isna().tolist() == [True] * 6 + [False] * 4
    assert 24 < history["memory_bytes"].max() < 1000


def test_log_adds_metrics_at_the_step_where_they_were_logged(lab: Lab) -> None:
    run = train(
        lab,
        "raw",
        """
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            log(lr=0.1 * step, place=torch.tensor(rank))
        log(late=1.0, step=77)
        """,
    )
    rows = run.history.query("rank == 1")
    assert rows["step"].tolist() == [1, 2, 3, 77]
    assert rows["lr"].dropna().tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert rows["place"].dropna().tolist() == [1.0] * 3
    assert rows["late"].dropna().tolist() == [1.0]


def test_log_counts_its_calls_where_there_is_no_optimizer(lab: Lab) -> None:
    run = train(lab, "raw", "for i in range(4):\n    log(loss=float(i))")
    rows = run.history.query("rank == 0")
    assert rows["step"].tolist() == [0, 1, 2, 3]
    assert rows["loss"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_log_within_the_first_of_steps_of_several_passes_counts_no_calls(
    lab: Lab,
) -> None:
    code = (
        "import itertools\n"
        "model = torch.nn.Linear(2, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.TensorDataset(torch.ones(24, 2))\n"
        "model, sgd, loader = prepare(model, sgd, data, batch_size=4)\n"
        "for number, (x,) in enumerate(loader):\n"
        "    model(x).mean().backward()\n"
        "    if number % 3 == 2:\n"
        "        sgd.step()\n"
        "    log(number=number)"
    )
    history = lab.train("ddp", code, live=False).history
    numbers = history[(history["rank"] == 0) & history["number"].notna()]
    assert list(numbers["step"]) == [0, 0, 1, 1, 1, 2]


def test_log_before_the_step_counts_the_steps_taken(lab: Lab) -> None:
    run = train(
        lab,
        "raw",
        """
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model(torch.ones(4, 2)).mean()
            loss.backward()
            log(before=step, loss=7.0)
            optimizer.step()
        """,
    )
    rows = run.history.query("rank == 0")
    assert rows["step"].tolist() == [0, 1, 2]
    assert rows["loss"].tolist() == [7.0] * 3  # the cell's own word, not the noticed


def test_the_weight_of_an_uneven_batch_ends_with_the_loader(lab: Lab) -> None:
    code = """
        data = torch.utils.data.TensorDataset(torch.arange(5.0).reshape(5, 1))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = prepare(model, optimizer, data, batch_size=4, shuffle=False)
        for (x,) in loader:
            pass
        w = torch.ones(1, requires_grad=True)
        (w * 3).sum().backward()
        gradient = w.grad.item()
        """
    train(lab, "ddp", code)
    assert lab.pull("gradient", "all") == [3.0, 3.0]


def test_no_record_is_lost_at_a_thousand_a_second(lab: Lab) -> None:
    run = train(
        lab,
        "raw",
        """
        import time
        start = time.perf_counter()
        for i in range(2000):
            log(value=i)
            time.sleep(max(0, start + i / 1000 - time.perf_counter()))
        """,
    )
    assert run.collector.num_lost == 0
    for rank in (0, 1):
        rows = run.history.query(f"rank == {rank}")
        assert rows["value"].tolist() == list(range(2000))


TEXTBOOK_CELL = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from labkit.data import digits

dataset = digits()
sampler = DistributedSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_raw_runs_a_textbook_cell_as_it_stands(lab: Lab) -> None:
    run = train(lab, "raw", TEXTBOOK_CELL)
    assert run.num_steps == 46
    one, other = lab.pull("model", "all")
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_raw_runs_a_script_that_makes_its_own_group(lab: Lab, capsys: Captured) -> None:
    def train_as_in_tutorials(rank: int, world_size: int) -> None:
        import os

        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = "12355"
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        torch.manual_seed(rank)
        model = DistributedDataParallel(nn.Linear(10, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for _ in range(3):
            nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
            loss = model(torch.randn(20, 10)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("done on", dist.get_backend())
        dist.destroy_process_group()

    train_as_in_tutorials.__module__ = "__main__"
    for _ in range(2):
        run = lab.train("raw", train_as_in_tutorials, live=False)
        assert run.num_steps == 3
        captured = capsys.readouterr()
        assert captured.out == "[ranks 0-1] done on gloo\n"
        # Once for both ranks, or where they were far apart for each.
        assert 1 <= captured.err.count("gloo is used instead") <= 2
    lab.run("x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())")
    assert capsys.readouterr().out == "[ranks 0-1] 2.0\n"


def test_a_script_for_another_number_of_ranks_is_reported(lab: Lab) -> None:
    with pytest.raises(RankError, match=r"world_size=8.*this rank has world_size=2"):
        lab.run("dist.init_process_group('gloo', rank=rank, world_size=8)")
    lab.run("dist.barrier()")


def test_a_config_is_that_of_its_own_run(lab: Lab, capsys: Captured) -> None:
    code = (
        "from labkit.rank.engine.rpc import runner\n"
        "print(runner()._session.options.config)"
    )
    config = {"prescale_gradients": True}
    for given in (config, {}, config):
        train(lab, "zero1", code, config=given)
        assert capsys.readouterr().out == f"[ranks 0-1] {given}\n"


BREAKS_OFF = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
samples = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model, optimizer, loader = prepare(model, optimizer, samples, batch_size=8)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            break
"""


@pytest.mark.parametrize("strategy", long_but(["ddp", "fsdp", "zero2"], "zero2"))
def test_a_step_that_is_broken_off_leaves_no_gradients(lab: Lab, strategy: str) -> None:
    models = []
    for each in ("single", strategy):
        lab.train(each, BREAKS_OFF, accumulate=2, live=False)
        models.append(lab.pull("model", full=True))
    expected, found = models
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


COMPARES = """
import torch.nn.functional as F

model = torch.nn.Linear(8, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 8))
model, optimizer, loader = prepare(model, optimizer, samples, batch_size=8)
for x, y in loader:
    one, other = (F.normalize(each) for each in model(torch.stack([x, y])))
    {gather}
    scores = one @ other.T
    F.cross_entropy(scores, torch.arange(len(scores))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GATHER = """
    from {} import {} as gather
    one, other = (gather(each, 0, loader.group) for each in (one, other))
""".format(*all_gather_with_gradients().rsplit(".", 1))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_loss_that_compares_a_ranks_samples_alone_is_noted(
    lab: Lab, capsys: Captured, strategy: str
) -> None:
    train(lab, strategy, COMPARES.format(gather="pass"))
    assert "compares samples with each other" in capsys.readouterr().err
    train(lab, strategy, COMPARES.format(gather=GATHER.strip()))
    assert "compares samples" not in capsys.readouterr().err


def test_single_is_a_world_of_one(lab: Lab, capsys: Captured) -> None:
    code = "print(rank, world_size, dist.get_world_size())\ndist.barrier()"
    assert train(lab, "single", code).world_size == 1
    assert capsys.readouterr().out == "[rank 0] 0 1 1\n"
    lab.run("print(dist.get_world_size())")
    assert capsys.readouterr().out == "[ranks 0-1] 2\n"


def test_single_runs_a_script_that_makes_its_own_group(
    lab: Lab, capsys: Captured
) -> None:
    def work(rank: int, world_size: int) -> None:
        from torch.distributed import destroy_process_group
        from torch.distributed import init_process_group

        init_process_group("gloo", rank=rank, world_size=world_size)
        print("world of", torch.distributed.get_world_size())
        destroy_process_group()

    work.__module__ = "__main__"
    lab.train("single", work, live=False)
    assert capsys.readouterr().out == "[rank 0] world of 1\n"
    lab.run("dist.new_group([0, 1])\ndist.barrier()", timeout=20)


def test_groups_made_in_a_single_cell_leave_later_ones_alone(lab: Lab) -> None:
    train(lab, "single", "dist.new_group([0])")
    lab.run("group = dist.new_group([0, 1])\ndist.barrier(group)", timeout=20)


def test_a_decorated_function_has_the_names_of_the_rank(
    lab: Lab, capsys: Captured
) -> None:
    import functools

    def main() -> None:
        print(world_size)  # type: ignore[name-defined]  # noqa: F821

    main.__module__ = "__main__"
    lab.train("raw", functools.partial(main), live=False)
    assert capsys.readouterr().out == "[ranks 0-1] 2\n"


def test_a_function_without_parameters_uses_names_of_the_rank(
    lab: Lab, capsys: Captured
) -> None:
    def work() -> None:
        print(rank, kept)  # type: ignore[name-defined]  # noqa: F821
        log(loss=1.0)  # type: ignore[name-defined]  # noqa: F821

    work.__module__ = "__main__"
    lab.run("kept = 'here'")
    run = lab.train("ddp", work, live=False)
    assert capsys.readouterr().out == "[rank 0] 0 here\n[rank 1] 1 here\n"
    assert run.history["loss"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("prepare(3, None, [])", "prepare takes a torch.nn.Module"),
        ("prepare(m, 3, [1])", "make one from the model's parameters"),
        ("prepare(m, torch.optim.SGD(other.parameters()), [1])", "no parameter of"),
        ("prepare(m, o, [1])", "batch_size is None"),
        ("prepare(m, o, [1], batch_size=0)", "must be a whole number, 1 or more"),
        ("prepare(m, o, [], batch_size=1)", "the dataset is empty"),
        ("fit(m, [1], None, optimizer=o, batch_size=1, epochs=0)", "epochs is 0"),
        ("log(seconds=1)", "is labkit's own; choose another name"),
        ("log(loss=1, step=1.5)", "the step must be a whole number"),
        ("log(loss=1, step=2**70)", "the step must be a whole number"),
        ("log(loss='low')", "takes a number or a tensor of one element"),
        ("log(loss=torch.ones(3))", r"a tensor of shape \(3,\)"),
    ],
)
def test_wrong_arguments_in_a_cell_are_explained(
    lab: Lab, code: str, message: str
) -> None:
    setup = (
        "m, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "o = torch.optim.SGD(m.parameters())\n"
    )
    with pytest.raises(RankError, match=message):
        train(lab, "ddp", setup + code)


def test_prepare_is_not_for_raw_cells(lab: Lab) -> None:
    with pytest.raises(RankError, match="raw leaves everything to the cell"):
        train(lab, "raw", "prepare(torch.nn.Linear(1, 1), None, [1], batch_size=1)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "zero9"}, "choose one of: single, ddp, zero1, zero2, zero3"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**70}, "from 0 to"),
        ({"code_or_function": 5}, "neither code nor a function"),
        ({"name": "a/b"}, "use letters"),
        ({"timeout": 0}, "number of seconds"),
    ],
)
def test_a_run_that_cannot_be_leaves_no_trace(
    lab: Lab, arguments: dict[str, Any], message: str
) -> None:
    before = list(lab.runs)
    with pytest.raises(ValueError, match=message):
        lab.train(**{"strategy": "ddp", "code_or_function": "1", **arguments})
    assert lab.runs == before


def test_run_names_are_unique(lab: Lab) -> None:
    name = f"mine-{len(lab.runs)}"
    assert train(lab, "raw", "1", name=name).name == name
    assert train(lab, "raw", "1", name=name).name == f"{name}-2"
    assert train(lab, "raw", "1", name=name).name == f"{name}-3"


def test_an_optimizer_that_is_tried_logs_nothing(lab: Lab) -> None:
    code = """
class Mine(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        log(rate=self.param_groups[0]["lr"])
model = torch.nn.Linear(2, 2)
optimizer = Mine(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(model, optimizer, torch.zeros(8, 2), batch_size=4)
for x in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""
    history = lab.train("zero1", code, live=False).history
    assert history["rate"].dropna().tolist() == [0.5] * 4
    assert history["step"].max() == 2
