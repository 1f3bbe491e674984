"""What is around a model's forward pass: a method of each model and copy."""

import copy
import inspect
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from labkit import Lab
from labkit import RankError
from labkit.checks import UnsupportedLoopError
from labkit.rank.engine.hints import FORWARD_MODE
from labkit.rank.engine.hints import NEW_PARAMETER
from labkit.rank.engine.hints import UNKNOWN_OUTPUT
from labkit.strategies.autograd.exports import IN_PARTS
from labkit.strategies.autograd.exports import SCRIPTED
from labkit.strategies.autograd.forward import Forward
from labkit.strategies.autograd.forward import wrap_forward
from labkit.strategies.autograd.structures import Given
from labkit.strategies.autograd.structures import flatten
from labkit.strategies.autograd.structures import hand_back
from labkit.strategies.autograd.structures import holders_in
from labkit.strategies.autograd.structures import replaced
from labkit.strategies.autograd.structures import unflatten
from labkit.strategies.model.shards import PART_OF_OPTIMIZER
from labkit.strategies.zero.stage_3 import TRANSFORMED

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


@pytest.mark.parametrize("strategy", ["single", "zero2", "fsdp", "pipeline"])
def test_a_pickle_of_a_prepared_model_is_explained(lab: Lab, strategy: str) -> None:
    code = SET_UP + PREPARE + "import pickle\npickle.dumps(model)\n"
    with pytest.raises(RankError, match=re.escape("Pickle model.state_dict()")):
        lab.train(strategy, code, live=False)


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


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "tensor", "pipeline"])
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
[others] = [each for each in gathered(mine) if each["part"][0] != rank]
optimizer.load_state_dict(others)
"""
    gathered = """
def gathered(mine):
    found = [None] * world_size
    dist.all_gather_object(found, mine)
    return found
"""
    refused = "part of the optimizer's state under .*; this is rank"
    with pytest.raises(RankError, match=refused):
        lab.train(strategy, SET_UP + gathered + PREPARE + code, live=False)


@pytest.mark.parametrize("strategy", ["zero1", "pipeline"])
def test_a_plain_optimizer_takes_no_part_of_a_prepared_one(
    lab: Lab, strategy: str
) -> None:
    code = """
def step(optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
x, y = next(iter(loader))
step(optimizer)
mine = optimizer.state_dict()
step(optimizer)
plain = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
try:
    plain.load_state_dict(mine)
    said = ""
except ValueError as error:
    said = str(error)
optimizer.load_state_dict(mine)
"""
    lab.train(strategy, SET_UP + PREPARE + code, live=False)
    for rank, said in enumerate(lab.pull("said", ranks="all")):
        wanted = PART_OF_OPTIMIZER.format(rank=rank, of=2, strategy=strategy)
        assert said == wanted


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
CALLED = "model(data[:2][0])"
BEFORE = {
    REMOVED: "model[1] = torch.nn.utils.parametrizations.weight_norm(model[1])\n",
    CALLED: """
class ByNumber(torch.nn.Sequential):
    def forward(self, x):
        return {1: super().forward(x)}
model = ByNumber(*model)
""",
}
JVP = "torch.func.jvp(model, (data[:2][0],), (data[:2][0],))"


@pytest.mark.parametrize(
    ("strategy", "code", "words"),
    [
        ("fsdp", REMOVED, NEW_PARAMETER),
        ("zero3", REMOVED, NEW_PARAMETER),
        ("zero3", CALLED, UNKNOWN_OUTPUT),
        ("zero3", JVP, TRANSFORMED),
        ("zero3", "torch.func.vjp(model, data[:2][0])", TRANSFORMED),
        ("pipeline", JVP, FORWARD_MODE),
    ],
)
def test_what_parts_of_a_model_cannot_do_is_said(
    lab: Lab, strategy: str, code: str, words: str
) -> None:
    set_up = SET_UP.replace("optimizer =", BEFORE.get(code, "") + "optimizer =")
    with pytest.raises(RankError, match=re.escape(words)):
        lab.train(strategy, set_up + PREPARE + code, live=False)


HANDS_ON = """
from torch import nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, given):
        {block}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        given = {{"h": self.stem(x)}}
        for block in self.blocks:
            {call}
        self.score = given["h"].square().mean()
        return self.score

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = prepare(model, optimizer, torch.randn(16, 6), batch_size=8)
for x in loader:
    model(x)
    model.score.backward()
    optimizer.step()
    optimizer.zero_grad()
model(torch.ones(4, 6))
score = model.score.item()
"""
COMPUTE = "given['h'] = self.down(self.up(given['h']).relu())"
RETURNS = HANDS_ON.format(block=f"{COMPUTE}; return given", call="given = block(given)")
RETURNS_NOTHING = HANDS_ON.format(block=COMPUTE, call="block(given)")


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_loss_that_the_model_keeps_has_gradients(lab: Lab, strategy: str) -> None:
    """The model returns nothing that a hook could be on."""
    code = RETURNS.replace("return self.score", "")
    scores = []
    for each in ("single", strategy):
        lab.train(each, code, live=False)
        scores.append(lab.pull("score", ranks=0))
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_dict_that_a_block_puts_its_results_into_is_refused(
    lab: Lab, strategy: str
) -> None:
    with pytest.raises(RankError, match="changes a list, a dict or an object"):
        lab.train(strategy, RETURNS_NOTHING, live=False)


def test_what_a_layer_keeps_and_another_takes_is_refused(lab: Lab) -> None:
    """Ranks that do not run the layer have nothing of it."""
    keeps = "self.kept = {'h': self.down(self.up(given['h']).relu())}"
    code = HANDS_ON.format(block=keeps, call="block(given); given = block.kept")
    with pytest.raises(RankError, match="computed and not returned"):
        lab.train("pipeline", code, live=False)


@dataclass(frozen=True, slots=True)
class Pair:
    one: Any
    other: Any


def test_objects_are_opened_and_closed() -> None:
    tensors = [torch.tensor(float(number)) for number in range(5)]
    words = SimpleNamespace(text="no tensor")
    given = (
        Pair(tensors[0], Pair([tensors[1], 3], SimpleNamespace(x=tensors[2]))),
        words,
        SimpleNamespace(pairs={"a": tensors[3], "b": (tensors[4], "c")}),
    )
    leaves, spec = flatten(given)
    found = [each for each in leaves if isinstance(each, torch.Tensor)]
    assert found == tensors
    assert words in leaves
    doubled = [each * 2 if isinstance(each, torch.Tensor) else each for each in leaves]
    first, second, third = unflatten(doubled, spec)
    assert first.other.other.x.item() == 4.0
    assert first.other.one == [torch.tensor(2.0), 3]
    assert third.pairs["b"][0].item() == 8.0
    assert second is words
    assert given[0].other.other.x.item() == 2.0  # these are others


def test_objects_in_a_list_are_a_cache_of_the_models() -> None:
    """As the keys and values of transformers, which each block adds to."""
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(1))])
    given = Given((cache,), {})
    cache.layers.append(SimpleNamespace(keys=torch.ones(1)))
    assert not given.has_changed(None)
    assert flatten(cache)[0] == [cache]


class Table(dict[str, Any]):
    size = 0


class Row(list[Any]):
    pass


def test_dicts_and_lists_of_ones_own_are_opened_and_closed() -> None:
    table = Table(x=torch.ones(1), y=[torch.ones(1), 3])
    table.size = 2
    row = Row([torch.ones(1), "word"])
    leaves, spec = flatten((table, SimpleNamespace(row=row), Table(a=1)))
    doubled = [each * 2 if isinstance(each, torch.Tensor) else each for each in leaves]
    first, second, third = unflatten(doubled, spec)
    assert first == Table(x=torch.tensor([2.0]), y=[torch.tensor([2.0]), 3])
    assert (type(first), first.size, third) == (Table, 2, Table(a=1))
    assert second.row == Row([torch.tensor([2.0]), "word"])
    assert type(second.row) is Row
    assert table["x"] == 1


def test_an_object_that_is_there_twice_stays_one() -> None:
    one = SimpleNamespace(x=torch.ones(1))
    first, second, other = unflatten(*flatten((one, one, copy.copy(one))))
    assert first is second
    assert other is not first


def test_what_a_module_puts_into_a_list_or_a_dict_is_found() -> None:
    x: list[Any] = [torch.ones(1)]
    for found in (features := [], table := Table()):
        given = Given((x[0], found), {})
        assert not given.has_changed(x[0])
        features.append(torch.ones(1))
        table["h"] = torch.ones(1)
        assert given.has_changed(x[0])
    given = Given((features,), {})
    features.append(torch.ones(1))
    assert not given.has_changed(features)


def test_a_caller_gets_its_own_lists_and_objects_back() -> None:
    mine = [torch.zeros(1)], {"x": 1}, SimpleNamespace(hidden=None), [5.0]
    copies = copy.deepcopy(mine)
    given = Given(copies, {})
    more, table, state, _ = copies
    more.append(torch.ones(1))
    table["y"] = torch.ones(1)
    state.hidden = torch.ones(1)
    output = (more, torch.ones(2), [table, state])
    assert not given.has_changed(output)
    own, returned = holders_in(mine), holders_in(output)
    places = given.returned_in(output)
    found = hand_back([(own[n], returned[k]) for n, k in places], output)
    assert found[0] is mine[0]
    assert found[2][0] is mine[1]
    assert len(mine[0]) == 2
    assert mine[1] == table
    assert mine[2].hidden is state.hidden
    assert mine[3] == [5.0]
    given = Given(copies, {})
    state.hidden = torch.zeros(1)
    assert given.returned_in(state) == [(2, 0)]
    assert hand_back([(mine[2], state)], state) is mine[2]
    assert mine[2].hidden is state.hidden


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput."""

    def update(self, *args: Any) -> None:  # type: ignore[override]
        raise TypeError


@dataclass(frozen=True)
class Features:
    hidden: Any
    kept: list[Any]


class Private:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    def doubled(self) -> Any:
        return 2 * self.__hidden


def test_what_is_within_an_object_or_another_list_is_the_callers_own() -> None:
    kept: list[Any] = [torch.ones(1)]
    mine = Features(torch.ones(1), kept), {"kept": [kept[0]]}, Output(x=torch.ones(1))
    leaves, spec = flatten(mine)
    state, table, output = copies = unflatten(leaves, spec)
    given = Given(copies, {})
    state.kept.append(torch.ones(1))
    assert given.has_changed(None)  # it is lost, unless it is returned
    table["kept"].append(torch.ones(1))
    output["x"] = torch.zeros(1)
    found = replace(state, hidden=torch.zeros(1)), table, output
    assert not given.has_changed(found)
    own = holders_in(mine)
    places = given.returned_in(found)
    found = hand_back([(own[n], given.holders[n]) for n, _ in places], found)
    assert found[0].kept is kept
    assert len(kept) == 2
    assert found[1] is mine[1]
    assert len(mine[1]["kept"]) == 2
    assert found[2] is mine[2]
    assert mine[2]["x"] is output["x"]


def test_a_list_that_is_given_twice_is_not_to_change() -> None:
    mine: list[Any] = [torch.ones(1)]
    first, second = [*mine], [*mine]
    hand_back([(mine, first), (mine, second)], (first, second))
    first.append(torch.ones(1))
    with pytest.raises(UnsupportedLoopError, match="the same list as two arguments"):
        hand_back([(mine, first), (mine, second)], (first, second))


def test_slots_with_private_names_are_opened() -> None:
    leaves, spec = flatten(Private(torch.ones(1)))
    assert unflatten([leaves[0] * 2], spec).doubled().item() == 4.0


LATER = """
import torch.nn as nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x, kept, fails=False):
        x = torch.tanh(self.linear(x))
        if fails:
            raise ValueError
        if kept is not None:
            kept.append(x)
        return x, kept

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kept = self.fails = False
    def forward(self, x):
        kept = [x] if self.kept else None
        for number, block in enumerate(self.blocks):
            x, _ = block(x, kept, self.fails and number == 2)
        return x + sum(kept) if self.kept else x

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, torch.randn(24, 4), batch_size=4, shuffle=False
)
{before}
for number, x in enumerate(loader):
    model.kept = number > {number}
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
FAILS = """
model.kept = model.fails = True
for x in loader:
    try:
        model(x)
    except ValueError:
        pass
    break
model.fails = False
"""


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
@pytest.mark.parametrize(("before", "number"), [("", 3), (FAILS, -1)])
def test_a_block_is_given_a_list_in_later_passes_alone_or_has_failed(
    lab: Lab, strategy: str, before: str, number: int
) -> None:
    code = LATER.replace("{before}", before).replace("{number}", str(number))
    for each in ("single", strategy):
        lab.train(each, code, live=False, timeout=60)
        found = lab.pull("model", full=True)
        if each == "single":
            expected = found
    torch.testing.assert_close(found, expected)


ANEW = """
import collections, gc, weakref
from dataclasses import InitVar, dataclass, field
from typing import Any
import torch.nn as nn

@dataclass
class State:
    x: InitVar[Any]
    hidden: Any = None
    num: int = field(init=False, default=0)
    def __post_init__(self, x):
        self.hidden = 2 * x

class Table(dict):
    def __init__(self, x):
        super().__init__(x=x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, state, table, more):
        if fails:
            raise ValueError
        if not hasattr(state, "mask"):
            state.mask = (state.hidden > 0).float().detach()
        x = state.hidden * state.mask / state.num + table["x"] * state.scale
        return torch.tanh(self.linear(x + sum(more["more"])))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
    def forward(self, x):
        x = self.stem(x)
        seen.append(weakref.ref(x))
        state, table, more = State(x), Table(x), collections.defaultdict(list)
        state.scale = 0.3
        for block in self.blocks:
            state.num += 1
            more["more"].append(state.hidden)
            state.hidden = block(state, table, more)
        return self.head(state.hidden)

torch.manual_seed(0)
fails, seen = False, []
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
model, optimizer, loader = prepare(
    model, optimizer, torch.randn(24, 4), batch_size=4, shuffle=False
)
for x in loader:
    fails = True
    try:
        model(x)
    except ValueError:
        pass
    gc.collect()
    is_alive = seen[-1]() is not None
    fails = False
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    model.head.double()  # a part of what is gathered at once
    model.head.float()
"""


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_blocks_are_given_objects_as_they_are_and_parts_of_a_model_move(
    lab: Lab, strategy: str
) -> None:
    """`fully_shard` re-creates them, without what was done to them since, and gathers
    what a part was before it moved."""
    for each in ("single", strategy):
        lab.train(each, ANEW, live=False, timeout=60)
        found = lab.pull("model", full=True)
        if each == "single":
            expected = found
    torch.testing.assert_close(found, expected)
    assert not lab.pull("is_alive", ranks=0)  # of a pass that has failed


CIRCLE = RETURNS.replace("given = {", "given = {} if not self.training else {").replace(
    "for block in", "given['given'] = given\n        for block in"
)
NEW_ATTRIBUTE = (
    HANDS_ON.format(
        block="given.more = getattr(given, 'more', self.up(given.h)); "
        "return self.down(self.up(given.h).relu() + given.more)",
        call="given.h = block(given)",
    )
    .replace('{"h": self.stem(x)}', "types.SimpleNamespace(h=self.stem(x))")
    .replace('given["h"]', "given.h")
    .replace("from torch import nn", "from torch import nn\nimport types")
)


@pytest.mark.parametrize(
    ("code", "words"),
    [(CIRCLE, "contains itself"), (NEW_ATTRIBUTE, "changes a list, a dict")],
)
def test_what_gradients_would_not_pass_through_is_refused(
    lab: Lab, code: str, words: str
) -> None:
    with pytest.raises(RankError, match=words):
        lab.train("fsdp", code, live=False)


def test_tensors_are_replaced_in_copies_of_what_they_are_in() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    words = ["no tensor"]
    features = Features(one, [other])
    given = Output(x=(one, words)), features, features, {"y": [other]}, words
    output, first, second, table, same = found = replaced(
        given, lambda tensor: 2 * tensor if tensor is one else tensor
    )
    assert type(found) is tuple
    assert (type(output), output["x"]) == (Output, (2 * one, words))
    assert first is second
    assert (first.hidden, first.kept is features.kept) == (2 * one, True)
    assert (table is given[3], same is words) == (True, True)
    assert given[0]["x"][0] is one


def test_an_attribute_that_is_gone_or_new_is_so_in_the_callers_own() -> None:
    mine = SimpleNamespace(hidden=torch.ones(1), first=True)
    state = copy.copy(mine)
    del state.first
    state.last = True
    hand_back([(mine, state)], state)
    assert vars(mine).keys() == {"hidden", "last"}
    given = Given((state,), {})
    state.more = torch.ones(1)
    assert not given.has_changed(None)
    state.more = torch.ones(1, requires_grad=True)
    assert given.has_changed(None)


def test_a_circle_of_objects_ends() -> None:
    one = SimpleNamespace(x=torch.ones(1))
    one.self = one
    assert flatten(one)[0]


def test_an_attribute_that_an_object_keeps_for_itself_is_no_result() -> None:
    chances = torch.distributions.Bernoulli(logits=torch.zeros(2))
    given = Given((chances,), {})
    assert chances.probs.tolist() == [0.5, 0.5]  # it is computed, and kept
    assert not given.has_changed(None)

    state = SimpleNamespace(hidden=torch.zeros(2))
    given = Given((state,), {})
    state.hidden = torch.ones(2)
    assert given.has_changed(None)
    assert not given.has_changed(state)


WRITES = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x, y = torch.randn(16, 8), torch.randn(16, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *others, other=None):
        BODY


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        total, made = x * 1, x.new_zeros(2, len(x), 8)
        for block in self.blocks:
            x = x + block(GIVEN)
        return x + total + made.sum(0)


model = Net()
HOOK
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(x, y), batch_size=8, shuffle=False
)
for a, b in loader:
    optimizer.zero_grad()
    F.mse_loss(model(a), b).backward()
    optimizer.step()
with torch.no_grad():
    result = model(x.to(device)).cpu()
"""

WRITES_WITHIN = {
    "a list": (
        "x[1].add_(self.b(torch.sigmoid(self.a(x[0]))))\n        return self.a(x[0])",
        "[x, total]",
        "",
    ),
    "a dict": (
        "x[1].add_(self.b(torch.sigmoid(self.a(x[0]))))\n        return self.a(x[0])",
        "{0: x, 1: total}",
        "",
    ),
    "one given twice": (
        "x *= torch.sigmoid(self.a(x.clone()))\n        return self.b(others[0].sin())",
        "x, x",
        "",
    ),
    "one given by keyword, too": (
        "x *= torch.sigmoid(self.a(x.clone()))\n        return self.b(other.sin())",
        "x, other=x",
        "",
    ),
    "what it returns": (
        "x *= torch.sigmoid(self.a(x.clone()))\n        return x",
        "x)\n            h = total\n            k = block(h)\n"
        "            k += self.stem(k.clone()",
        "",
    ),
    "what a hook adds": (
        "x *= torch.sigmoid(others[0])\n        return self.b(torch.sigmoid(x))",
        "x",
        "model.blocks[0].register_forward_pre_hook(lambda _, x: (x[0], x[0] * 2))\n"
        "model.blocks[1].register_forward_pre_hook(lambda _, x: (x[0], x[0] * 2))",
    ),
    "values alone": (
        "with torch.no_grad():\n            others[0].mul_(0.5)\n"
        "        return self.b(torch.sigmoid(self.a(x))) + others[0]",
        "x, total",
        "",
    ),
    "a part of another": (
        "others[0].mul_(self.a(x)[:, :4].sigmoid())\n        return self.b(x.sin())",
        "x, total[:, :4]",
        "",
    ),
    "parts of one, which it does not return": (
        "others[0].copy_(self.b(torch.sigmoid(self.a(x))))\n"
        "        return x[:, :4].repeat(1, 2)",
        "x, made[block is self.blocks[0]]",
        "",
    ),
    "parts without a common element": (
        "x.mul_(self.b(torch.sigmoid(self.a(x.clone()))))\n"
        "        return x + others[0]",
        "*(lambda both: (both[:, :8], both[:, 8:]))(x.repeat(1, 2))",
        "",
    ),
    "one that is given without its history, too": (
        "x.mul_(self.b(torch.sigmoid(self.a(x.clone()))))\n"
        "        return self.a(x) * others[0]",
        "x, x.detach()",
        "",
    ),
    "a view that it returns": (
        "y = x.view(-1, 2, 4)\n"
        "        y.mul_(self.b(self.a(x.clone()).sin()).view(-1, 2, 4))\n"
        "        return y.view(-1, 8)",
        "x * 1",
        "",
    ),
}


HOOKS_WITHIN = {
    "a hook": (
        "if x.requires_grad:\n            x.register_hook(lambda g: g / 2)\n"
        "        return self.b(torch.sigmoid(self.a(x)))",
        "x",
        "",
    ),
    "after its pass": (
        "return self.b(torch.sigmoid(self.a(x)))",
        "x",
        "def change(_, given, output):\n    if output.requires_grad:\n"
        "        given[0].register_hook(lambda g: g / 2)\n"
        "model.blocks[1].register_forward_hook(change)",
    ),
    "two, of which it removes one": (
        "if x.requires_grad:\n            x.register_hook(lambda g: g / 2)\n"
        "            x.register_hook(lambda g: g * 3).remove()\n"
        "        return self.b(torch.sigmoid(self.a(x)))",
        "x",
        "",
    ),
}


@pytest.mark.parametrize("within", WRITES_WITHIN | HOOKS_WITHIN)
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_writes_to_what_it_is_given(lab: Lab, strategy: str, within: str) -> None:
    """The caller goes on with what a block has written to."""
    body, given, hook = (WRITES_WITHIN | HOOKS_WITHIN)[within]
    code = WRITES.replace("BODY", body).replace("GIVEN", given).replace("HOOK", hook)
    lab.train("single", code, live=False)
    expected = lab.pull("result")
    lab.train(strategy, code, live=False)
    torch.testing.assert_close(lab.pull("result"), expected, rtol=1e-4, atol=1e-5)


WRITE = (
    "x.mul_(self.b(torch.sigmoid(self.a(x.clone()))))\n"
    "        return self.b(torch.sigmoid(self.a(x.clone())))"
)
BY_HOOKS = {
    "keep what is written to later": (
        WRITE,
        "hook(lambda _, x, y: kept.append(x[0]))",
        "total.mul_(self.stem(x).sigmoid())\n        return kept[-1] + ",
    ),
    "keep what forward writes to": (
        WRITE,
        "pre_hook(lambda _, x: kept.append(x[0]))",
        "kept[-1].mul_(self.stem(x).sigmoid())\n        return ",
    ),
    "write to what a block is given": (
        WRITE,
        "hook(lambda _, x, y: (x[0].mul_(0.5), None)[1])",
        "return ",
    ),
    "write to what it hands on": (
        "return x",
        "hook(lambda _, x, y: (y[:, :4].mul_(0.5), None)[1])",
        "return ",
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", BY_HOOKS)
def test_hooks_of_zero3_have_what_the_caller_has(
    lab: Lab, what: str, when: str
) -> None:
    """A module has others in place of its inputs: hooks of it would not be seen."""
    body, hook, then = BY_HOOKS[what]
    register = f"for each in model.blocks: each.register_forward_{hook}\n"
    code = WRITES.replace("BODY", body).replace("GIVEN", "total")
    code = code.replace("return x + total", f"{then}x + total")
    code = code.replace("HOOK", "kept = []\n" + register * (when == "before"))
    code = code.replace("for a, b in", register * (when == "after") + "for a, b in")
    lab.train("single", code, live=False)
    expected = lab.pull("result")
    lab.train("zero3", code, live=False)
    torch.testing.assert_close(lab.pull("result"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "body", "what"),
    [
        (
            "zero3",
            "x.register_hook(torch.sin); x.mul_(2)",
            "a Block registers a hook on a tensor",
        ),
        ("zero3", "x.retain_grad()", "a Block calls retain_grad() of a tensor"),
        ("fsdp", "x.data = x * 2", "a Block sets .data of a tensor"),
        (
            "pipeline",
            "x.register_hook(torch.sin)",
            "blocks.0 registers a hook on a tensor",
        ),
        ("pipeline", "x.data = x * 2", "blocks.0 sets .data of a tensor"),
        (
            "zero3",
            "others[0].mul_(2)",
            "a Block writes to a tensor, or a view of it, that it is given twice",
        ),
    ],
)
def test_changes_that_the_caller_would_not_see(
    lab: Lab, strategy: str, body: str, what: str
) -> None:
    """The block is given another tensor than the caller has."""
    body = f"if x.requires_grad: {body}\n        return self.b(self.a(x))"
    given = "x, x[:, :4]" if "others" in body else "x"
    code = WRITES.replace("BODY", body).replace("GIVEN", given).replace("HOOK", "")
    with pytest.raises(RankError, match=re.escape(what)):
        lab.train(strategy, code, live=False)


COUNTED = """
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

gather, count = groups.foreach_all_gather, 0


def counted(*args):
    global count
    count += 1
    return gather(*args)


groups.foreach_all_gather = counted
"""


def test_fsdp_gathers_no_block_again_for_what_it_hands_on(lab: Lab) -> None:
    """Its gradient comes when those of the block have been reduced."""
    body = "return PAIR[0], self.b(torch.sigmoid(self.a(x)))"
    code = WRITES.replace("BODY", body).replace("GIVEN", "x").replace("HOOK", COUNTED)
    code = code.replace("+ block(x)", "+ sum(block(x))")
    code += "\ngroups.foreach_all_gather = gather"
    counts = []
    for handed_on in ("x", "x.view(-1, 8)", "x * 1"):
        lab.train("fsdp", code.replace("PAIR[0]", handed_on), live=False)
        counts.append(lab.pull("count"))
    assert counts[0] == counts[1] == counts[2] > 0


HOOKS_AND_WRITES = (
    "y = x + 1\n        for _ in range(2 * x.requires_grad):\n"
    "            x.register_hook(lambda g: g / 2)\n            x[:, :4] *= 0.5\n"
    "        x.add_(self.a(x.clone()).sigmoid())\n"
    "        return self.b(x.clone()) + y"
)


def test_fsdp_calls_hooks_before_and_after_a_write_to_a_part(lab: Lab) -> None:
    code = WRITES.replace("BODY", HOOKS_AND_WRITES).replace("HOOK", "")
    code = code.replace("GIVEN", "total")
    lab.train("single", code, live=False)
    expected = lab.pull("result")
    lab.train("fsdp", code, live=False)
    torch.testing.assert_close(lab.pull("result"), expected, rtol=1e-4, atol=1e-5)
