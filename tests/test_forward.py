"""What is around a model's forward pass: a method of each model and copy."""

import copy
import inspect
import pickle
import re

import pytest
import torch
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.rank.engine.hints import FORWARD_MODE
from labkit.rank.engine.hints import NEW_PARAMETER
from labkit.strategies.autograd.exports import IN_PARTS
from labkit.strategies.autograd.exports import SCRIPTED
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward

pytestmark = pytest.mark.timeout(120)


def doubled(plain: Forward) -> Forward:
    return lambda model, x: 2 * plain(model, x)


def test_a_copy_has_its_own_weights() -> None:
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    wrap_forward(model, doubled)
    other = copy.deepcopy(model)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(other.weight, 5.0)
    assert (model(x).item(), other(x).item()) == (2.0, 10.0)


def test_what_was_there_comes_back() -> None:
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.constant_(model.weight, 1.0)
    undo = wrap_forward(model, doubled)
    undo()
    assert "forward" not in vars(model)
    vars(model)["forward"] = given = lambda x: x + 3  # as many a library does
    undo_outer = wrap_forward(model, doubled)
    assert model(x).item() == 8.0
    undo_outer()
    assert vars(model)["forward"] is given


def test_wrapped_twice_is_undone_in_turn() -> None:
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.constant_(model.weight, 1.0)
    inner, outer = wrap_forward(model, doubled), wrap_forward(model, doubled)
    assert model(x).item() == 4.0
    outer()
    assert model(x).item() == 2.0
    inner()
    assert model(x).item() == 1.0


def test_what_the_loop_put_in_its_place_stays() -> None:
    model = nn.Linear(1, 1)
    undo = wrap_forward(model, doubled)
    vars(model)["forward"] = given = lambda x: x
    undo()
    assert vars(model)["forward"] is given


def test_the_signature_stays_and_a_pickle_has_the_plain_one() -> None:
    model = nn.Bilinear(2, 3, 1)
    before = inspect.signature(model.forward)
    wrap_forward(model, doubled)
    assert inspect.signature(model.forward) == before
    read = pickle.loads(pickle.dumps(model))
    assert read.forward.__func__ is nn.Bilinear.forward


SET_UP = """
import copy
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from labkit.models import mlp
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(16, 64), torch.zeros(16).long())
"""
PREPARE = """
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
"""


def test_an_interrupted_forward_pass_leaves_no_autocast(lab: Lab) -> None:
    interrupted = """
def interrupt(*args):
    raise KeyboardInterrupt  # as the key in the middle of a forward pass
model[-1].register_forward_hook(interrupt)
"""
    step = "for x, y in loader:\n    model(x)\n"
    code = SET_UP + interrupted + PREPARE + step
    with pytest.raises(RankError, match=r"[Ii]nterrupt"):
        lab.train("ddp", code, precision="bf16", live=False)
    lab.run("is_on = torch.is_autocast_enabled('cpu')")
    assert lab.pull("is_on", ranks="all") == [False, False]


def test_a_copy_of_a_checkpointed_model_has_its_own_weights(lab: Lab) -> None:
    code = """
kept = copy.deepcopy(model)
with torch.no_grad():
    for parameter in kept.parameters():
        parameter.zero_()
x = data[:4][0]
is_of_its_own = bool((kept(x) == 0).all()) and bool((model(x) != 0).any())
"""
    options = {"activation_checkpointing": True, "precision": "bf16"}
    lab.train("ddp", SET_UP + PREPARE + code, live=False, **options)
    assert lab.pull("is_of_its_own", ranks="all") == [True, True]


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_another_ranks_part_of_the_optimizer_is_refused(
    lab: Lab, strategy: str
) -> None:
    code = """
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
mine = optimizer.state_dict()
optimizer.load_state_dict(mine)
others = {**mine, "part": [1 - rank, *mine["part"][1:]]}
optimizer.load_state_dict(others)
"""
    with pytest.raises(RankError, match="part of the optimizer"):
        lab.train(strategy, SET_UP + PREPARE + code, live=False)


EXPORTS = {
    "torch.jit.trace(model, sample)": IN_PARTS,
    "torch.export.export(model, (sample,))": IN_PARTS,
    "torch.jit.script(model)": SCRIPTED,
}


@pytest.mark.parametrize("strategy", ["single", "zero3", "tensor", "pipeline"])
def test_what_would_export_a_part_of_a_model_is_refused(
    lab: Lab, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    code = SET_UP + PREPARE + "sample = torch.randn(2, 64)\n"
    for export, words in EXPORTS.items():
        if strategy == "single" and words is IN_PARTS:
            lab.train(strategy, code + export, live=False)
            continue
        refused = re.escape(words.format(strategy=strategy))
        with pytest.raises(RankError, match=refused):
            lab.train(strategy, code + export, live=False)
    assert "TracerWarning" not in capsys.readouterr().out


def test_a_model_is_scripted_after_its_run(lab: Lab) -> None:
    lab.train("ddp", SET_UP + PREPARE + "model(data[:2][0])", live=False)
    lab.run("torch.jit.script(model)")


REMOVED = """
from torch.nn.utils import parametrize
parametrize.remove_parametrizations(model[1], "weight")
model(data[:2][0])
"""
JVP = "torch.func.jvp(model, (data[:2][0],), (data[:2][0],))"


@pytest.mark.parametrize(
    ("strategy", "code", "words"),
    [
        ("fsdp", REMOVED, NEW_PARAMETER),
        ("zero3", REMOVED, NEW_PARAMETER),
        ("zero3", JVP, FORWARD_MODE),
        ("pipeline", JVP, FORWARD_MODE),
    ],
)
def test_what_parts_of_a_model_cannot_do_is_said(
    lab: Lab, strategy: str, code: str, words: str
) -> None:
    set_up = SET_UP
    if code is REMOVED:
        wrapped = "model[1] = torch.nn.utils.parametrizations.weight_norm(model[1])\n"
        set_up = SET_UP.replace("optimizer =", wrapped + "optimizer =")
    with pytest.raises(RankError, match=re.escape(words)):
        lab.train(strategy, set_up + PREPARE + code, live=False)
