"""What all ranks have to do alike: refused where they do not, and said in words."""

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from marks import long_but
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.strategies.autograd.agreement import Course
from labkit.strategies.autograd.agreement import InOrder
from labkit.strategies.autograd.agreement import Route
from labkit.strategies.autograd.agreement import Settings
from labkit.strategies.autograd.backward import follow
from labkit.strategies.autograd.backward import living
from labkit.strategies.autograd.backward import unfollow
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.mesh.peers import Pending

pytestmark = pytest.mark.timeout(120)

SET_UP = """
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
x = torch.randn(32, 6)
x[:, 0] = torch.tensor([1.0, -1.0]).repeat_interleave(4).repeat(4)
y = (x[:, 1] > 0).long()
data = TensorDataset(x, y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2)
    def forward(self, x):
        for number in self.order(x):
            x = self.blocks[number](x)
        return self.head(x)
    def order(self, x):
        return range(3)
"""
PREPARE = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=8, shuffle=False
)
"""
STEP = """
for inputs, labels in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""
CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 10}}


def train(lab: Lab, strategy: str, *parts: str, **options: Any) -> Any:
    config = CONFIG if strategy == "zero3" else None
    code = "\n".join(map(textwrap.dedent, parts))
    options = {"timeout": 30, **options}
    return lab.train(strategy, code, live=False, config=config, **options)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "hsdp"])
def test_ranks_that_run_layers_in_another_order_are_stopped(
    lab: Lab, strategy: str
) -> None:
    order = """
    Net.order = lambda self, x: [0, 1, 2] if rank == 0 else [1, 0, 2]
    """
    with pytest.raises(RankError, match="ranks ran different layers"):
        train(lab, strategy, SET_UP, order, PREPARE, STEP)


def test_an_evaluation_by_other_layers_is_refused(lab: Lab) -> None:
    evaluate = """
    Net.order = lambda self, x: [0, 1, 2] if rank == 0 else [1, 0, 2]
    with torch.no_grad():
        for inputs, labels in loader.share(data, batch_size=8):
            model(inputs)
    """
    with pytest.raises(RankError, match="ranks ran different layers"):
        train(lab, "fsdp", SET_UP, PREPARE, STEP, evaluate)


def test_a_run_after_a_refused_one_is_right(lab: Lab) -> None:
    order = "Net.order = lambda self, x: [rank]"
    for strategy in ("zero3", "fsdp"):
        with pytest.raises(RankError, match="ranks ran different layers"):
            train(lab, strategy, SET_UP, order, PREPARE, STEP)
    found = []
    for strategy in ("ddp", "zero3", "fsdp"):
        train(lab, strategy, SET_UP, PREPARE, STEP)
        found.append(lab.pull("model", full=True))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_the_state_of_another_strategy_is_refused(lab: Lab, strategy: str) -> None:
    other = "fsdp" if strategy != "fsdp" else "zero2"
    train(lab, other, SET_UP, PREPARE, STEP, "kept = optimizer.state_dict()")
    load = "optimizer.load_state_dict(kept)"
    with pytest.raises(RankError, match=f"part of the optimizer's state under {other}"):
        train(lab, strategy, SET_UP, PREPARE, load)


def test_gradients_are_reduced_in_one_order() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    first, second, third, fourth = parameters
    reduced: list[nn.Parameter] = []
    queue = InOrder(reduced.append, parameters, Peers(0, 1, torch.device("cpu")))
    queue.begin(Pending(lambda: parameters))
    queue.add(second)  # waits for those after it
    assert reduced == []
    queue.add(fourth)
    assert [id(p) for p in reduced] == [id(fourth)]
    queue.add(third)
    assert [id(p) for p in reduced] == [id(fourth), id(third), id(second)]
    assert [id(p) for p in queue.late()] == [id(first)]
    queue.begin(Pending(lambda: [second]))  # another pass, that reaches no more
    queue.add(second)
    assert reduced[-1] is second
    assert queue.late() == []


def test_gradients_are_held_until_there_are_enough_to_send() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    first, second, third = parameters
    reduced: list[nn.Parameter] = []
    peers = Peers(0, 1, torch.device("cpu"))
    queue = InOrder(reduced.append, parameters, peers, num_held=4)
    for _ in range(2):
        reduced.clear()
        queue.begin(Pending(lambda: parameters))
        queue.add(third)
        assert reduced == []
        queue.add(second)
        assert [id(each) for each in reduced] == [id(third), id(second)]
        queue.add(first)
        assert reduced[-1] is first
    queue.begin(Pending(lambda: parameters))
    queue.add(third)
    assert {id(each) for each in queue.late()} == {id(first), id(second)}


LARGE = """
import time
import torch.distributed as dist
from torch import nn
def make():
    layers = [nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), Shared()]
    return nn.Sequential(*layers, nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1))

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        total = torch.ones(())
        dist.all_reduce(total)
        return gradient * total

class Shared(nn.Module):
    def forward(self, x):
        return Sum.apply(x)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 8))
prepared = []
for model in (make(), make()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared += prepare(model, optimizer, data, batch_size=8, shuffle=False)
one, of_one, loader, other, of_other, _ = prepared
for (x,) in loader:
    loss = one(x).square().mean() + other(x).square().mean()
    if dist.get_rank() == 0:
        time.sleep(0.1)  # the others are far in their pass when it begins its own
    loss.backward()
    of_one.step(); of_one.zero_grad()
    of_other.step(); of_other.zero_grad()
"""


def test_what_else_a_backward_pass_sends_meets_no_gradients(lab: Lab) -> None:
    found = []
    for strategy in ("ddp", "zero2"):
        train(lab, strategy, LARGE)
        found.append([lab.pull(name, full=True) for name in ("one", "other")])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_who_follows_twice_sees_each_backward_pass_once() -> None:
    class Follower:
        given_parameters = ()

    follower: Any = Follower()
    follow(follower)
    follow(follower)
    assert [each for each in living() if each is follower] == [follower]
    unfollow(follower)
    assert not [each for each in living() if each is follower]


def test_a_route_is_of_layers_and_their_order() -> None:
    def taken(*numbers: int) -> int:
        route = Route()
        for number in numbers:
            route.add(number)
        return route.take()

    routes = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (0, 1, 2)]
    assert len({taken(*each) for each in routes}) == len(routes)
    assert taken(0, 1) == taken(0, 1)


def test_settings_are_numbers_and_words() -> None:
    def settings(**group: Any) -> int:
        optimizer: Any = SimpleNamespace(param_groups=[{"params": [object()], **group}])
        return Settings(optimizer).number

    assert settings(lr=0.1, betas=(0.9, 0.99)) == settings(lr=0.1, betas=(0.9, 0.99))
    assert settings(lr=0.1) != settings(lr=0.2)
    assert settings(betas=(0.9, 0.99)) != settings(betas=(0.9, 0.9))
    assert settings(lr=0.1, state=object()) == settings(lr=0.1, state=object())
    assert settings(lr=torch.tensor(0.1)) != settings(lr=torch.tensor(0.2))
    assert settings(lr=np.float32(0.1)) != settings(lr=np.float32(0.2))
    assert settings(lr=np.float64(0.1)) == settings(lr=0.1)


def test_settings_are_those_of_the_moment() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    settings = Settings(optimizer)
    first = settings.number
    optimizer.param_groups[0]["lr"] = 0.2
    second = settings.number
    optimizer.param_groups[0]["lr"] = 0.1
    assert first == settings.number != second


LAST_OF_FIVE = """
data = TensorDataset(x[:29], y[:29])
"""
CHUNKS = """
for inputs, labels in loader:
    optimizer.zero_grad()
    for part, answers in zip(inputs.split(2), labels.split(2)):
        F.cross_entropy(model(part), answers).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "strategy",
    long_but(
        ["ddp", "zero1", "zero2", "zero3", "fsdp"], "ddp", "zero2", "zero3", "fsdp"
    ),
)
def test_other_numbers_of_backward_passes_are_refused(lab: Lab, strategy: str) -> None:
    does = "calls the model" if strategy in ("zero3", "fsdp") else "begins a backward"
    said = (
        f"different numbers of forward or backward passes: rank 0, which has 3 "
        f"samples, {does}.* and rank 1, which has 2 samples, steps after 1 backward "
        "pass."
    )
    with pytest.raises(RankError, match=said):
        train(lab, strategy, SET_UP, LAST_OF_FIVE, PREPARE, CHUNKS)
    train(lab, strategy, SET_UP, PREPARE, CHUNKS)  # even
    assert not lab.runs[-1].mismatches


def test_other_numbers_of_passes_within_a_closure_are_refused(lab: Lab) -> None:
    given = "SGD(model.parameters(), lr=0.1"
    prepare = PREPARE.replace(given, "LBFGS(model.parameters(), max_iter=2")
    loop = """
    for inputs, labels in loader:
        def closure():
            optimizer.zero_grad()
            for part, answers in zip(inputs.split(2), labels.split(2)):
                loss = F.cross_entropy(model(part), answers)
                loss.backward()
            return loss
        optimizer.step(closure)
    """
    with pytest.raises(RankError, match="different numbers of forward or backward"):
        train(lab, "ddp", SET_UP, LAST_OF_FIVE, prepare, loop)


def test_a_part_that_is_too_small_for_one_rank_is_refused(lab: Lab) -> None:
    skip = STEP.replace(":\n", ":\n    if len(inputs) < 3:\n        continue\n", 1)
    said = "rank 1, .*, takes the next batch after no backward passes"
    with pytest.raises(RankError, match=said):
        train(lab, "ddp", SET_UP, LAST_OF_FIVE, PREPARE, skip, skip)


def test_passes_by_the_values_of_samples_are_refused_as_such(lab: Lab) -> None:
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        for _ in range(2 if inputs[0, 0] > 0 else 1):
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    """
    with pytest.raises(RankError, match="different numbers of forward or backward"):
        train(lab, "fsdp", SET_UP, PREPARE, loop)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_calls_of_the_model_by_the_values_of_samples_are_refused(
    lab: Lab, strategy: str
) -> None:
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs = [model(inputs)]
        while len(outputs) < LENGTH:
            outputs.append(model(inputs + outputs[-1].mean()))
        F.cross_entropy(sum(outputs), labels).backward()
        optimizer.step()
    """
    said = (
        "rank 0 calls the model after no backward passes, and rank 1 begins a backward "
        "pass after .* Where it depends on the samples, as on the longest"
    )
    by_values = loop.replace("LENGTH", "(3 if inputs[0, 0] > 0 else 2)")
    with pytest.raises(RankError, match=said):
        train(lab, strategy, SET_UP, PREPARE, by_values)
    # Equal in the steps that are compared anyhow, but not in all of these alike.
    later = "(2 + loader.number % 2 + (loader.number > 3 and inputs[0, 0] > 0))"
    count = loop.replace("zero_grad()", "zero_grad(); loader.number += 1")
    code = "loader.number = 0\n" + textwrap.dedent(count.replace("LENGTH", later))
    with pytest.raises(RankError, match=said):
        train(lab, strategy, SET_UP, PREPARE, code)


def test_a_part_that_ends_the_pass_of_one_rank_is_refused(lab: Lab) -> None:
    leave = STEP.replace(":\n", ":\n    if len(inputs) < 3:\n        break\n", 1)
    with pytest.raises(RankError, match=r"rank 1, .*, takes the next batch after"):
        train(lab, "ddp", SET_UP, LAST_OF_FIVE, PREPARE, leave, leave)


@pytest.mark.parametrize(
    "look",
    ["found = next(iter(loader))", "found = sum(len(labels) for _, labels in loader)"],
)
def test_batches_are_not_for_one_rank_alone(lab: Lab, look: str) -> None:
    with pytest.raises(RankError, match=r"loader.* takes batches of the loader on one"):
        train(lab, "ddp", SET_UP, PREPARE, f"if rank == 0:\n    {look}", STEP)


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 8), ("ddp", 7)])
def test_a_rank_that_has_taken_batches_alone_is_refused_in_training(
    lab: Lab, strategy: str, size: int
) -> None:
    prepare = PREPARE.replace("batch_size=8", f"batch_size={size}")
    look = "who = rank\nexec('if who == 0: found = next(iter(loader))')"
    with pytest.raises(RankError, match="Or one rank alone took batches of the loader"):
        train(lab, strategy, SET_UP, prepare, look, STEP)


def test_each_pass_has_an_order_of_its_own_whenever_it_is_left(lab: Lab) -> None:
    draw = """
    found = []
    for _ in range(3):
        inputs, labels = next(iter(loader))
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        found.append(inputs)
    """
    train(lab, "ddp", SET_UP, PREPARE.replace(", shuffle=False", ""), draw)
    first, second, third = lab.pull("found")
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_one_rank_may_leave_a_pass_after_its_last_step(lab: Lab) -> None:
    leave = STEP + "    if len(inputs) < 3:\n        break\n"
    train(lab, "ddp", SET_UP, LAST_OF_FIVE, PREPARE, leave, leave)
    left = lab.pull("model", full=True)
    assert not lab.runs[-1].mismatches
    train(lab, "ddp", SET_UP, LAST_OF_FIVE, PREPARE, STEP, STEP)
    torch.testing.assert_close(left, lab.pull("model", full=True))


def test_a_batch_that_one_rank_skips_by_its_values_is_refused(lab: Lab) -> None:
    uneven = PREPARE.replace("batch_size=8", "batch_size=7")
    loop = """
    num_steps = 0
    for number, (inputs, labels) in enumerate(loader):
        if rank == 1 and number == 0:
            continue
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if (num_steps := num_steps + 1) == 3:
            break
    """
    with pytest.raises(RankError, match="some skipped one"):
        train(lab, "ddp", SET_UP, uneven, loop)


def test_batches_of_two_loaders_are_compared_from_the_first_on(lab: Lab) -> None:
    other = """
    critic = Net()
    steps = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic, steps, even = prepare(critic, steps, data, batch_size=8, shuffle=False)
    for (inputs, labels), _ in zip(loader, even):
        optimizer.zero_grad()
        for number in range(len(inputs)):
            F.cross_entropy(model(inputs[number]), labels[number]).backward()
        optimizer.step()
    """
    uneven = PREPARE.replace("batch_size=8", "batch_size=7")
    with pytest.raises(RankError, match="different numbers of forward or backward"):
        train(lab, "ddp", SET_UP, uneven, other)


def test_what_layers_that_gather_do_is_compared_until_it_is_alike() -> None:
    def steps_until(calls: list[int]) -> int | None:
        course = Course(Peers(0, 1, torch.device("cpu")))
        course.begin_looking()
        for number, num_calls in enumerate(calls):
            if not course._looks:
                return number
            for _ in range(num_calls):
                course.begin_call()
                course.forward()
                course.end_call()
            course.step()
        return None

    assert steps_until([2] * 50) == 3
    # Of a GAN's critic, which the generator's step calls once more.
    assert steps_until([2] + [3] * 50) == 11
    assert steps_until([2, 3] * 50) is None


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_call_of_the_model_is_compared_once(lab: Lab, strategy: str) -> None:
    count = """
    from labkit.rank.engine.rpc import runner
    course = runner()._session.prepared()[0].course
    compare, events = course._compare, []
    def counted(event, which):
        events.append(event.name)
        return compare(event, which)
    course._compare = counted
    course._looks = False  # as after some steps, which are compared anyhow
    """
    again = """
    loss = F.cross_entropy(model(inputs), labels) + model.blocks[0](inputs).mean()
    loss.backward()
    """
    train(lab, strategy, SET_UP, LAST_OF_FIVE, PREPARE, count, STEP, again)
    assert lab.pull("events") == [
        *("FORWARD", "BACKWARD", "STEP", "BATCH"),
        *("FORWARD", "FORWARD", "BACKWARD", "BATCH"),
    ]


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_a_step_that_one_rank_leaves_out_is_refused(lab: Lab, strategy: str) -> None:
    loop = """
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if rank == 0 or number != 1:
            optimizer.step()
    """
    with pytest.raises(RankError, match="taken a step that others skipped"):
        train(lab, strategy, SET_UP, PREPARE, loop)


@pytest.mark.parametrize("strategy", long_but(["fsdp", "hsdp"], "fsdp"))
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "penalty",
    ["sum(p.pow(2).sum() for p in model.parameters())", "0.1 * p.norm()", "p.sum()"],
)
def test_a_penalty_that_one_rank_adds_is_refused(
    lab: Lab, strategy: str, step: int, penalty: str
) -> None:
    """In the first steps, in which all that ranks do is compared, and later."""
    loop = f"""
    p = next(model.parameters())
    for number, (inputs, labels) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), labels)
        if inputs[0, 0].item() < 0 and number == {step}:
            loss = loss + {penalty}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    with pytest.raises(RankError, match="some ranks compute a number of the model's"):
        train(lab, strategy, SET_UP, PREPARE, loop)


def test_a_last_step_that_one_rank_leaves_out_is_noted(lab: Lab) -> None:
    loop = """
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if rank == 0 or number != 3:
            optimizer.step()
    """
    run = train(lab, "fsdp", SET_UP, PREPARE, loop)
    steps = "rank 1 took 3 optimizer steps, rank 0 took 4, so they no longer hold one "
    assert any(each.startswith(steps) for each in run.mismatches)


def test_replicas_of_a_run_that_failed_between_two_steps_are_reported(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = """
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        assert rank == 0 or number != 2, "between backward and step"
        optimizer.step()
    """
    with pytest.raises(RankError, match="between backward and step"):
        train(lab, "ddp", SET_UP, PREPARE, loop)
    report = "rank 1 took 2 optimizer steps, rank 0 took 3, so they no longer hold one "
    assert report in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_of_parts_that_differ_is_refused(lab: Lab, tmp_path: Path) -> None:
    loop = f"""
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    save_checkpoint({str(tmp_path / "one")!r})
    """
    with pytest.raises(RankError, match="the optimizer's settings differ"):
        train(lab, "fsdp", SET_UP, PREPARE, STEP, loop)
    assert not (tmp_path / "one").exists()


def test_calls_of_layers_that_some_ranks_leave_out_are_refused(lab: Lab) -> None:
    code = """
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        def forward(self, x):
            return [self.head(self.body(x * n)) for n in (1, 2, 3)]
    model = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(
        model, optimizer, TensorDataset(torch.randn(24, 4)), batch_size=8
    )
    for (x,) in loader:
        sum(o.square().mean() for o in model(x)[rank:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    with pytest.raises(RankError, match="different calls of the model's layers"):
        train(lab, "zero3", SET_UP, code)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_batches_that_a_thread_draws_are_refused(lab: Lab, strategy: str) -> None:
    prefetched = """
    import queue, threading
    class Background:
        def __init__(self, loader):
            self.loader = loader
        def __iter__(self):
            drawn = queue.Queue(2)
            def draw():
                for batch in self.loader:
                    drawn.put(batch)
            threading.Thread(target=draw, daemon=True).start()
            return iter(drawn.get, None)
    loader = Background(loader)
    """
    with pytest.raises(RankError, match="a thread of the loop's own draws"):
        train(lab, strategy, SET_UP, PREPARE, prefetched, STEP)
    assert lab.runs[-1].state == "failed"
    train(lab, strategy, SET_UP, PREPARE, STEP)


def test_the_root_may_not_be_called_on_its_own_output_another_number_of_times(
    lab: Lab,
) -> None:
    again = """
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        def forward(self, x):
            return self.second(self.first(x).relu())
    Net = Plain
    """
    loop = """
    for number, (inputs, labels) in enumerate(loader):
        found = inputs
        for _ in range(2 if number == 3 and rank else 1):
            found = model(found)
        F.mse_loss(found, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    with pytest.raises(RankError, match="ranks ran different layers"):
        train(lab, "fsdp", SET_UP, again, PREPARE, loop)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_ranks_may_run_the_root_another_number_of_times(
    lab: Lab, strategy: str
) -> None:
    one_by_one = """
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
        def forward(self, x):
            return self.second(self.first(x).relu())
    Net = Plain
    data = TensorDataset(x[:31], y[:31])
    """
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(model(a[None]), b[None]) for a, b in zip(inputs, labels)
        ]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    """
    found = []
    for each in ("single", strategy):
        train(lab, each, SET_UP, one_by_one, PREPARE, loop)
        found.append(lab.pull("model", full=True))
    values = [m.state_dict() if isinstance(m, nn.Module) else m for m in found]
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "hsdp"])
def test_a_parameter_of_a_layer_that_only_some_ranks_use(
    lab: Lab, strategy: str
) -> None:
    masked = """
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
            self.token = nn.Parameter(torch.ones(6))
        def forward(self, x):
            mask = x[:, 0] > 0
            if mask.any():
                x = torch.where(mask[:, None], self.token, x)
            return self.second(self.first(x).relu())
    Net = Masked
    """
    found = []
    for each in ("single", strategy):
        train(lab, each, SET_UP, masked, PREPARE, STEP)
        found.append(lab.pull("model", full=True))
    values = [m.state_dict() if isinstance(m, nn.Module) else m for m in found]
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_rates_that_differ_from_the_backward_pass_on_are_refused(
    lab: Lab, strategy: str
) -> None:
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    """
    with pytest.raises(RankError, match="the optimizer's settings differ"):
        train(lab, strategy, SET_UP, PREPARE, loop)


def test_weights_set_while_they_are_gathered_are_refused(lab: Lab) -> None:
    loop = """
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        loss.backward()
    """
    with pytest.raises(RankError, match=r"set or moved head\.weight after a forward"):
        train(lab, "fsdp", SET_UP, PREPARE, loop)


def test_a_part_of_a_loss_may_wait_for_an_evaluation(lab: Lab) -> None:
    keep = """
    class Keeping(Net):
        def forward(self, x):
            output = super().forward(x)
            self.kept = self.scale.square().sum() + (x * self.scale).square().mean()
            return output
    Net = Keeping
    """
    scaled = SET_UP.replace(
        "self.head = nn.Linear(6, 2)",
        "self.head = nn.Linear(6, 2)\n        self.scale = nn.Parameter(torch.ones(6))",
    )
    loop = """
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss, kept = F.cross_entropy(model(inputs), labels), model.kept
        with torch.no_grad():
            model(inputs)
        (loss + kept).backward()
        optimizer.step()
    """
    for strategy in ("ddp", "fsdp"):
        train(lab, strategy, scaled, keep, PREPARE, loop)
        found = lab.pull("model", full=True)
        if strategy == "ddp":
            expected = found
    torch.testing.assert_close(found, expected)
