"""What a run has prepared, in the cells after it."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

from labkit import Lab
from labkit import RankError

MAKE = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset

def make(size):
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=numbers)
    return TensorDataset(x, torch.randint(3, (size,), generator=numbers))

def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )

def train(model, optimizer, loader):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PREPARE = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, make({size}), batch_size=8, shuffle=False
)
train(model, optimizer, loader)
"""
UNEVEN = MAKE + PREPARE.format(size=13)
EVEN = MAKE + PREPARE.format(size=16)
LOOK = "with torch.no_grad(): found = model(make(8)[:][0].to(device)).cpu()"


def one_process(size: int, *, epochs: int) -> torch.Tensor:
    """What `found` is after so many passes over so many samples."""
    names: dict[str, object] = {"torch": torch, "F": F, "TensorDataset": TensorDataset}
    exec(MAKE, names)
    make, net, train = (names[name] for name in ("make", "net", "train"))
    model = net()  # type: ignore[operator]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        train(model, sgd, DataLoader(make(size), batch_size=8))  # type: ignore[operator]
    with torch.no_grad():
        return model(make(8)[:][0])  # type: ignore[operator]


def net_of(code: str) -> torch.Tensor:
    """What `found` is after plain code in one process."""
    names: dict[str, object] = {"torch": torch, "DataLoader": DataLoader}
    exec(f"{code}\ndevice = 'cpu'\n{LOOK}", names)
    found = names["found"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "pipeline"])
def test_a_prepared_model_trains_on_in_an_ordinary_cell(
    lab: Lab, strategy: str
) -> None:
    lab.train(strategy, EVEN, live=False)
    lab.run("train(model, optimizer, loader)")
    lab.run(LOOK)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=2))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_later_step_that_needs_weights_is_refused(lab: Lab, strategy: str) -> None:
    lab.train(strategy, UNEVEN, live=False)
    lab.run("with torch.no_grad():\n    for x, y in loader: model(x)")
    lab.run(LOOK)
    before = lab.pull("found")
    with pytest.raises(
        RankError, match="weighting of losses, which this backward pass"
    ):
        lab.run(
            "for x, y in loader: F.cross_entropy(model(x), y).backward()\n"
            "optimizer.step()"
        )
    lab.run(LOOK)
    torch.testing.assert_close(lab.pull("found"), before)
    # Batches of equal parts need none.
    lab.run("optimizer.zero_grad()\nx, y = next(iter(loader))")
    lab.run("F.cross_entropy(model(x), y).backward()\noptimizer.step()")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_backward_pass_that_needs_weights_is_refused_for_any_optimizer(
    lab: Lab, strategy: str
) -> None:
    lab.train(strategy, UNEVEN, live=False)
    lab.run("own = torch.optim.SGD(model.parameters(), lr=0.1)")
    with pytest.raises(RankError, match="weighting of losses"):
        lab.run("train(model, own, loader)")


def test_microbatches_in_a_later_cell_are_refused(lab: Lab) -> None:
    lab.train("ddp", EVEN, accumulate=2, live=False)
    lab.run("own = torch.optim.SGD(model.parameters(), lr=0.1)")
    with pytest.raises(RankError, match="or microbatches"):
        lab.run("train(model, own, loader)")


def test_steps_after_gradients_of_the_run_are_weighted(lab: Lab) -> None:
    code = UNEVEN.replace("        optimizer.step()\n", "")
    code = code.replace("        optimizer.zero_grad()\n", "")
    lab.train("ddp", code, live=False)
    lab.run("optimizer.step()")


def test_a_sum_of_losses_is_refused_after_its_run(lab: Lab) -> None:
    code = EVEN.replace("batch_size=8", "batch_size=8, reduction='sum'")
    code = code.replace("(model(x), y)", "(model(x), y, reduction='sum')")
    lab.train("ddp", code, live=False)
    with pytest.raises(RankError, match="weighting of losses"):
        lab.run("train(model, optimizer, loader)")


NEW = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(
    model, optimizer, {data}, batch_size=8, shuffle=False
)
"""


def test_a_loader_of_an_earlier_run_is_refused_where_its_batches_need_weights(
    lab: Lab,
) -> None:
    lab.train("ddp", f"{UNEVEN}old = loader", live=False)
    new = NEW.format(data="make(16)")
    run = lab.train(
        "ddp",
        f"{new}with torch.no_grad():\n    for x, y in old: model(x)\n"
        "train(model, optimizer, loader)",
        live=False,
    )
    assert not run.notes
    with pytest.raises(RankError, match="from a loader that an earlier run prepared"):
        lab.train("ddp", f"{new}train(model, optimizer, old)", live=False)


def test_prepare_takes_the_loader_of_an_earlier_run(lab: Lab) -> None:
    lab.train("ddp", UNEVEN, live=False)
    new = NEW.format(data="loader").replace(", batch_size=8, shuffle=False", "")
    lab.train("ddp", f"{new}train(model, optimizer, loader)\n{LOOK}", live=False)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(13, epochs=1))


def test_a_later_run_that_does_not_prepare_says_that_another_did(lab: Lab) -> None:
    lab.train("ddp", EVEN, live=False)
    goes_on = "train(model, optimizer, loader)\n"
    with pytest.raises(RankError, match="trains on with what an earlier run prepared"):
        lab.train("ddp", goes_on, live=False)
    lab.train("ddp", EVEN, live=False)
    again = "model, optimizer, loader = prepare(model, optimizer, loader)\n"
    lab.train("ddp", again + goes_on + LOOK, live=False)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_optimizer_of_an_earlier_run_gets_no_note(lab: Lab, strategy: str) -> None:
    lab.train(strategy, UNEVEN, live=False)
    run = lab.train(
        strategy,
        "before, of_before = model, optimizer\n"
        f"{PREPARE.format(size=13)}train(before, of_before, loader)\n"
        "model = before\n" + LOOK,
        live=False,
    )
    assert not run.notes
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(13, epochs=2))


def test_a_model_under_fsdp_is_known_after_an_evaluation(lab: Lab) -> None:
    code = EVEN.replace(
        """    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )
""",
        "    return torch.nn.Linear(4, 3)\n",
    )
    lab.train("fsdp", code, live=False)
    lab.run(LOOK)  # after which the parameters of the root stay whole
    again = (
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "prepare(model, sgd, make(16), batch_size=8)"
    )
    for strategy in ("fsdp", "ddp"):
        with pytest.raises(RankError, match="model is sharded already"):
            lab.train(strategy, again, live=False)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_gradients_from_before_prepare_are_dropped_with_a_note(
    lab: Lab, strategy: str
) -> None:
    lab.run(
        f"{MAKE}\nmodel = net()\nF.cross_entropy(model(make(8)[:][0]), make(8)[:][1])"
        ".backward()"
    )
    code = PREPARE.format(size=16).replace("model = net()", "")
    run = lab.train(strategy, f"{code}\n{LOOK}", live=False)
    assert any("gradients from before prepare" in note for note in run.notes)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=1))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_gradients_of_an_earlier_run_count_in_the_first_step(
    lab: Lab, strategy: str
) -> None:
    part = "for x, y in loader: F.cross_entropy(model(x), y).backward()\n"
    again = PREPARE.format(size=16).replace("model = net()", "")
    code = EVEN.replace("train(model, optimizer, loader)\n", part)
    lab.train(strategy, code, live=False)
    lab.train(strategy, again + LOOK, live=False)
    plain = net_of(
        MAKE + "model = net()\noptimizer = torch.optim.SGD("
        "model.parameters(), lr=0.1)\nloader = DataLoader(make(16), batch_size=8)\n"
        + part
        + "train(model, optimizer, loader)"
    )
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, plain)


def test_a_cell_that_failed_on_one_rank_before_its_step_can_run_again(lab: Lab) -> None:
    """Its ranks are not equally far: only one has begun to reduce its gradients."""
    code = PREPARE.format(size=16).replace("model = net()", "")
    fails = (
        "for x, y in loader:\n"
        "    F.cross_entropy(model(x), y).backward()\n"
        "    if rank: raise ValueError('on purpose')\n"
        "    optimizer.step()\n"
    )
    lab.run(f"{MAKE}\nmodel = net()")
    with pytest.raises(RankError, match="on purpose"):
        lab.train(
            "zero1", code.replace("train(model, optimizer, loader)", fails), live=False
        )
    run = lab.train("zero1", f"{code}\n{LOOK}", live=False, hang_after=5)
    assert any("gradients that it has left are dropped" in note for note in run.notes)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=1))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "pipeline"])
def test_a_later_cell_saves_and_loads_what_ranks_have_in_parts(
    lab: Lab, strategy: str, tmp_path: Path
) -> None:
    lab.train(strategy, EVEN, live=False)
    both = "model=model, optimizer=optimizer"
    lab.run(f"save_checkpoint({str(tmp_path / 'a')!r}, {both})")
    code = EVEN.replace(
        "train(model, optimizer, loader)\n",
        f"load_checkpoint({str(tmp_path / 'a')!r})\n",
    )
    lab.train("ddp", f"{code}{LOOK}", live=False)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=1))
    lab.train(strategy, EVEN.replace("lr=0.1", "lr=0.5"), live=False)
    lab.run(f"load_checkpoint({str(tmp_path / 'a')!r}, {both})\n{LOOK}")
    lab.run("train(model, optimizer, loader)")
    lab.run(LOOK)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=2))
    if strategy in ("zero1", "zero2"):
        return  # of which every rank has the whole model
    other = "model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"
    with pytest.raises(RankError, match="not the optimizer that"):
        lab.run(f"save_checkpoint({str(tmp_path / 'b')!r}, {other})")


def test_steps_after_a_run_that_averages_now_and_then_are_refused(lab: Lab) -> None:
    lab.train("ddp", EVEN, average_every=2, live=False)
    with pytest.raises(RankError, match="no mean over the ranks is taken any longer"):
        lab.run("train(model, optimizer, loader)")


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_model_under_zero_is_copied_in_a_later_cell(lab: Lab, strategy: str) -> None:
    lab.train(strategy, EVEN, live=False)
    lab.run("import copy\nlast = copy.deepcopy(model[2])\nmodel = copy.deepcopy(model)")
    lab.run("model[2] = last\n" + LOOK)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=1))
    lab.run("x, y = make(8)[:]\nF.cross_entropy(model(x), y).backward()")


def test_a_later_step_says_that_bf16_has_ended_with_the_run(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.train("ddp", EVEN, precision="bf16", live=False)
    lab.run(LOOK)
    assert "fp32" not in "".join(capsys.readouterr())
    for _ in range(2):
        lab.run("train(model, optimizer, loader)")
    assert "".join(capsys.readouterr()).count("computes in fp32 from now on") == 1


def test_another_dtype_under_fsdp_is_explained(lab: Lab) -> None:
    lab.train("fsdp", EVEN, live=False)
    with pytest.raises(RankError, match="keep that of --precision, or of prepare"):
        lab.run("model.double()(make(8)[:][0].double());")


def test_a_hook_of_a_later_cell_that_fsdp_never_calls_is_refused(lab: Lab) -> None:
    lab.train("fsdp", EVEN, live=False)
    lab.run("model[0].weight.register_hook(lambda gradient: 0 * gradient);")
    with pytest.raises(RankError, match="has a hook for its gradient"):
        lab.run("train(model, optimizer, loader)")


def test_a_pipeline_is_not_pulled_as_one_object(lab: Lab) -> None:
    lab.train("pipeline", f"{EVEN}parameters = list(model.parameters())", live=False)
    for name in ("model", "parameters"):
        with pytest.raises(ValueError, match="in stages on several ranks"):
            lab.pull(name)
    assert lab.pull("model", full=True)["0.weight"].shape == (8, 4)


def test_prepare_of_a_run_that_is_over_is_refused(lab: Lab) -> None:
    lab.train("ddp", f"{EVEN}former = prepare", live=False)
    with pytest.raises(RankError, match="this prepare belongs to a run that has ended"):
        lab.run("former(model, optimizer, make(16), batch_size=8)")


def test_a_complex_tensor_is_no_scalar_to_log(lab: Lab) -> None:
    with pytest.raises(RankError, match="takes a number or a tensor of one element"):
        lab.train("raw", "log(a=torch.tensor(1j))", live=False)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_a_later_step_of_the_optimizer_that_fit_was_given(
    lab: Lab, strategy: str
) -> None:
    code = f"""{MAKE}
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fit(model, make(16), F.cross_entropy, optimizer=optimizer, batch_size=8, shuffle=False)
"""
    lab.train(strategy, code, live=False)
    later = """
whole = torch.utils.data.DataLoader(make(16), batch_size=8)
train(model, optimizer, whole)
"""
    if strategy.startswith("zero"):
        with pytest.raises(RankError, match="so its step changes nothing"):
            lab.run(later)
        return
    lab.run(later)
    lab.run(LOOK)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=2))


@pytest.mark.parametrize("strategy", ["single", "parameter_server"])
def test_stages_are_refused_where_not_all_ranks_train(lab: Lab, strategy: str) -> None:
    lab.train("pipeline", EVEN, live=False)
    again = "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    again += "prepare(model, sgd, make(16), batch_size=8)"
    with pytest.raises(RankError, match="in stages on ranks that do not all train"):
        lab.train(strategy, again, live=False, timeout=30)
    lab.train("ddp", f"{again}\n{LOOK}", live=False)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=1))


PARTS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 3)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.features(x))

model = Net()
"""
"""A model with a layer that is in no block: `fully_shard` gathers it for the whole."""


def test_a_part_of_a_model_under_fsdp_predicts_in_a_later_cell(lab: Lab) -> None:
    code = EVEN.replace("model = net()", PARTS)
    lab.train("fsdp", code, live=False)
    lab.run(
        "x = make(8)[:][0].to(device)\n"
        "with torch.inference_mode():\n"
        "    by_parts = model.head(model.features(x)).cpu()\n"
        "are_parts = all(hasattr(p, 'placements') for p in model.parameters())"
    )
    assert lab.pull("are_parts", "all") == [True, True]
    lab.run("with torch.no_grad(): whole = model(x).cpu()")
    with pytest.raises(RankError, match="keeps parameters as shards"):
        lab.run("model.head(model.features(x)).sum().backward()")
    torch.testing.assert_close(lab.pull("by_parts"), lab.pull("whole"))


def test_a_part_that_writes_to_its_parameters_under_fsdp_is_refused(lab: Lab) -> None:
    code = EVEN.replace("model = net()", PARTS).replace(
        "torch.nn.Linear(8, 3)", "Shrinking(8, 3)"
    )
    shrinking = (
        "class Shrinking(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if not torch.is_grad_enabled():\n"
        "            self.weight.mul_(0.5)\n"
        "        return super().forward(x)\n"
    )
    lab.train("fsdp", shrinking + code, live=False)
    with pytest.raises(RankError, match=r"changes its parameter head\.weight"):
        lab.run(
            "with torch.no_grad(): model.head(model.features(make(8)[:][0].to(device)))"
        )


WORKS_MORE = """
def train_more(model, optimizer, loader):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_each(model)

def after_each(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
"""
ON_ONE_RANK = """
class Trainer:
    def fit(self, model, optimizer, loader):
        train(model, optimizer, loader)
        if rank == 0:
            self.evaluate(model)

    def evaluate(self, model):
        return model(make(8)[:][0])

trainer = Trainer()
"""


def test_a_function_of_an_earlier_cell_is_read_with_the_cell(lab: Lab) -> None:
    lab.run(MAKE + WORKS_MORE)
    code = PREPARE.format(size=16).replace("\ntrain(", "\ntrain_more(")
    run = lab.train("ddp", code, accumulate=2, live=False)
    [note] = [each for each in run.notes if "the loop body runs 2 times" in each]
    assert note.startswith("line 6 of train_more: after_each(model): with")
    # What the cell defines itself is what it uses.
    run = lab.train(
        "ddp", MAKE + code.replace("train_more", "train"), accumulate=2, live=False
    )
    assert not any("the loop body runs 2 times" in each for each in run.notes)


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("from its_loops import train_more", "train_more"),
        ("import its_package.its_loops as loops", "loops.train_more"),
        ("import its_package.its_loops", "its_package.its_loops.train_more"),
    ],
)
def test_a_function_of_the_users_own_module_is_read_with_the_cell(
    lab: Lab, tmp_path: Path, way: str, call: str
) -> None:
    text = f"import torch\nimport torch.nn.functional as F\n{WORKS_MORE}"
    for folder in (tmp_path, tmp_path / "its_package"):
        folder.mkdir(exist_ok=True)
        (folder / "its_loops.py").write_text(text)
    lab.run(f"{MAKE}\nimport sys\nsys.path.append({str(tmp_path)!r})")
    code = way + PREPARE.format(size=16).replace("\ntrain(", f"\n{call}(")
    run = lab.train("ddp", code, accumulate=2, live=False)
    [note] = [each for each in run.notes if "the loop body runs 2 times" in each]
    assert note.startswith("line 6 of train_more: after_each(model): with")


def test_a_method_of_an_earlier_cell_is_read_with_the_cell(lab: Lab) -> None:
    lab.run(MAKE + ON_ONE_RANK)
    code = PREPARE.format(size=16).replace("\ntrain(", "\ntrainer.fit(")
    with pytest.raises(RankError, match=r"line 5 of Trainer: self.evaluate\(model\)"):
        lab.train("fsdp", code, live=False, timeout=30)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_later_cell_whose_backward_pass_fails_on_one_rank_can_be_followed(
    lab: Lab, strategy: str
) -> None:
    """The other rank is waiting for a layer's parameters then."""
    few = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    config = few if strategy == "zero3" else {}
    code = MAKE + PREPARE.format(size=16)
    lab.train(strategy, code, config=config, live=False)
    lab.run(
        "def bad(*args):\n    if rank == 1: raise ArithmeticError('on purpose')\n"
        "hook = model[2].register_full_backward_hook(bad)"
    )
    with pytest.raises(RankError, match="on purpose"):
        lab.run("train(model, optimizer, loader)", timeout=60)
    lab.run("hook.remove()\noptimizer.zero_grad()")
    lab.run("train(model, optimizer, loader)", timeout=60)
    lab.run(LOOK)
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, one_process(16, epochs=2))
    run = lab.train("fsdp", code, live=False, timeout=60)
    assert run.state == "finished"


@pytest.mark.timeout(120)
def test_a_pipeline_whose_last_cell_failed_between_messages_says_why_it_is_refused(
    lab: Lab,
) -> None:
    lab.train("pipeline", EVEN, live=False)
    fails = (
        "for x, y in loader:\n"
        "    F.cross_entropy(model(x), y).backward()\n"
        "    if rank: raise ValueError('on purpose')\n"
        "    optimizer.step()\n"
    )
    with pytest.raises(RankError, match="on purpose"):
        lab.run(fails, timeout=60)
    with pytest.raises(RankError, match="have taken a step that others skipped"):
        lab.run("train(model, optimizer, loader)", timeout=60)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "fsdp"])
def test_steps_that_only_some_ranks_take_are_reported(
    lab: Lab, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    lab.train(strategy, EVEN, live=False)
    everyone = 0 if strategy == "single" else None
    lab.run("train(model, optimizer, loader)", everyone)
    assert "optimizer steps" not in capsys.readouterr().err
    if strategy == "single":  # of which one rank has the model
        return
    fails = (
        "x, y = torch.ones(8, 4), torch.ones(8, dtype=int)\n"
        "F.cross_entropy(model(x), y).backward()\n"
        "if rank: raise ValueError('on purpose')\n"
        "optimizer.step()"
    )
    with pytest.raises(RankError, match="on purpose"):
        lab.run(fails, timeout=60)
    uneven = "rank 1 took 0 optimizer steps, rank 0 took 1, so they no longer hold one"
    # The step of zero2 is collective, and ends with the failure.
    assert (uneven in capsys.readouterr().err) == (strategy != "zero2")


def test_a_copy_of_a_model_under_fsdp_is_sharded_in_any_cell(lab: Lab) -> None:
    """The whole of the one that is copied is on no rank."""
    copied = """
import copy
twin = copy.deepcopy(copy.deepcopy(model))
with torch.inference_mode():
    shown = copy.deepcopy(model)
    shown(make(8)[:][0].to(device))
with torch.no_grad():
    shown(make(8)[:][0].to(device))
own = sum(p.to_local().numel() for p in twin.parameters())
hooks = [h for m in twin.modules() for h in m._forward_pre_hooks.values()]
ours = [h for h in hooks if h.__module__.startswith("labkit")]
"""
    lab.train("fsdp", EVEN + copied, live=False)
    for _ in range(2):  # at the end of the run, and in a cell after it
        assert sum(lab.pull("own", "all")) == 4 * 8 + 8 + 8 * 3 + 3
        assert lab.pull("ours", "all") == [[], []]
        lab.run(LOOK.replace("model(", "twin("))
        torch.testing.assert_close(lab.pull("found"), one_process(16, epochs=1))
        lab.run(copied)


def test_a_copy_of_a_model_under_zero3_may_be_prepared_and_trained(lab: Lab) -> None:
    """With an engine of its own, and not that of the model."""
    twin = """
import copy
twin = copy.deepcopy(model)
steps = torch.optim.SGD(twin.parameters(), lr=0.1)
twin, steps, again = prepare(twin, steps, make(16), batch_size=8, shuffle=False)
train(twin, steps, again)
with torch.no_grad():
    found = [each(make(8)[:][0].to(device)).cpu() for each in (model, twin)]
"""
    found = {}
    for strategy in ("single", "zero3"):
        lab.train(strategy, MAKE + PREPARE.format(size=16) + twin, live=False)
        found[strategy] = lab.pull("found")
    torch.testing.assert_close(found["zero3"], found["single"])


@pytest.mark.parametrize("strategy", ["zero2", "pipeline"])
def test_one_state_of_a_dict_with_a_part_of_them_is_refused(
    lab: Lab, strategy: str
) -> None:
    """A file and a copy have it as a plain dict, and the loop may load either."""
    code = MAKE + PREPARE.format(size=16).replace("=0.1", "=0.1, momentum=0.9")
    kept = """
import copy, io
torch.save(optimizer.state_dict(), file := io.BytesIO())
for each in (torch.load(io.BytesIO(file.getvalue())), optimizer.state_dict()):
    optimizer.load_state_dict(copy.deepcopy(each))
states = optimizer.state_dict()["state"]
sizes = [len(each) for each in copy.deepcopy(states).values()]
train(model, optimizer, loader)
"""
    lab.train(strategy, code + kept, live=False)
    size = 2 if strategy == "pipeline" else 1
    assert lab.pull("sizes", "all") == [[1] * size] * 2
    reads = "[states[number]['momentum_buffer'] for number in range(4)]"
    with pytest.raises(RankError, match=r"from optimizer\.state_dict\(\), and under"):
        lab.run(reads)


@pytest.mark.parametrize("strategy", ["zero2", "pipeline"])
def test_a_snapshot_of_the_states_has_their_values(lab: Lab, strategy: str) -> None:
    """Made by torch's trees, or as Accelerate makes one of the same types."""
    code = MAKE + PREPARE.format(size=16).replace("=0.1", "=0.1, momentum=0.9")
    kept = """
from torch.utils._pytree import tree_map_only

def numbers(saved):
    states = [each for state in saved["state"].values() for each in state.values()]
    return torch.cat([each.flatten() for each in states if torch.is_tensor(each)])

def copied(saved):
    if isinstance(saved, dict):
        return type(saved)({key: copied(each) for key, each in saved.items()})
    return saved.clone() if torch.is_tensor(saved) else saved

first = optimizer.state_dict()
saved = [tree_map_only(torch.Tensor, torch.clone, first), copied(first)]
before = numbers(first).clone()
train(model, optimizer, loader)
are_as_before = [torch.equal(numbers(each), before) for each in saved]
for each in saved:
    optimizer.load_state_dict(each)
is_back = torch.equal(numbers(optimizer.state_dict()), before)
"""
    lab.train(strategy, code + kept, live=False)
    assert lab.pull("are_as_before", "all") == [[True, True]] * 2
    assert lab.pull("is_back", "all") == [True, True]


TRAIN = "train(model, optimizer, loader)"
KEPT = """
best, kept = [9.0, 0.1][rank], None
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    if best > loss.item():
        kept = copy.deepcopy(KEPT)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    LAST
"""


@pytest.mark.parametrize("copied", ["model", "average"])
@pytest.mark.parametrize("last", ["pass", "break"])
def test_copies_that_only_some_ranks_make_under_fsdp_are_refused(
    lab: Lab, copied: str, last: str
) -> None:
    """Their parts would be of different steps: in the next backward pass."""
    average = "import copy\naverage = copy.deepcopy(model)"
    begin = MAKE + PREPARE.format(size=16).replace(TRAIN, average)
    loop = KEPT.replace("KEPT", copied).replace("LAST", last)
    with pytest.raises(RankError, match="some ranks have copied the model"):
        lab.train("fsdp", begin + loop, live=False)


def test_parameters_copied_with_a_model_under_fsdp_are_those_of_the_copy(
    lab: Lab,
) -> None:
    copied = """
import copy
both = copy.deepcopy({"model": model, "parameters": [*model.parameters()]})
pairs = zip(both["model"].parameters(), both["parameters"], strict=True)
are_same = all(own is other for own, other in pairs)
"""
    lab.train("fsdp", EVEN + copied, live=False)
    assert lab.pull("are_same", "all") == [True, True]
    with pytest.raises(RankError, match="before it has the model itself"):
        lab.run("copy.deepcopy([[*model.parameters()], model])")


def test_a_copy_of_a_model_under_fsdp_in_its_own_forward_pass_is_refused(
    lab: Lab,
) -> None:
    copying = """
import copy
model[0].register_forward_pre_hook(lambda *_: [copy.deepcopy(model)][1:] or None)
model(make(8)[:][0].to(device))
"""
    begin = MAKE + PREPARE.format(size=16).replace(TRAIN, "")
    with pytest.raises(RankError, match="forward pass that is under way"):
        lab.train("fsdp", begin + copying, live=False)


def test_a_copy_that_one_rank_makes_under_fsdp_at_the_end_is_noted(lab: Lab) -> None:
    copied = """
import copy
with torch.no_grad():
    best = [float(model(x).sum()) for x, y in loader]
if best[0] < best[1]:
    twin = copy.deepcopy(model)
"""
    run = lab.train("fsdp", EVEN + copied, live=False)
    assert "different numbers of copies" in run.mismatches[-1]


def test_a_rank_that_fails_after_its_loop_has_loaded_nothing_else(lab: Lab) -> None:
    code = EVEN + "\nmodel.load_state_dict(model.state_dict())\n"
    with pytest.raises(RankError, match="on purpose"):
        lab.train("ddp", code + "if rank: raise ValueError('on purpose')", live=False)
    assert lab.runs[-1].mismatches == []


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_model_that_was_set_in_inference_mode_does_not_hinder_another(
    lab: Lab, strategy: str
) -> None:
    """A backward pass asks each model that is there whether it is reached."""
    of_inference = """
with torch.inference_mode():
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
model[0].requires_grad_(False)
before = model
"""
    begin = MAKE + PREPARE.format(size=16).replace(TRAIN, "")
    lab.train(strategy, begin + of_inference, live=False)
    lab.train(strategy, EVEN, live=False)
    lab.run(LOOK)
    torch.testing.assert_close(
        lab.pull("found", ranks="0"), one_process(16, epochs=1), rtol=1e-4, atol=1e-5
    )
