"""Loops that look for gradients in an optimizer's groups."""

import pytest

from labkit import Lab
from labkit import RankError
from labkit.rank.code.own_gradients import group_gradient_use
from labkit.rank.code.own_gradients import group_value_use

READS = [
    "for g in opt.param_groups:\n    clip_grad_norm_(g['params'], 1.0)",
    "for g in self.optimizer.param_groups:\n"
    "    for p in g['params']:\n"
    "        if p.grad is not None:\n"
    "            p.grad.data.clamp_(-1, 1)",
    "nn.utils.clip_grad_value_(opt.param_groups[0]['params'], 1.0)",
    "clip_grad_norm_([p for g in opt.param_groups for p in g['params']], 1.0)",
    "mine = [p for g in opt.param_groups for p in g['params']]\n"
    "clip_grad_norm_(mine, 1.0)",
    "mine = opt.param_groups[0]['params']\nfor p in mine:\n    p.grad.mul_(0.5)",
    "n = sum(p.grad.norm() for g in opt.param_groups for p in g['params'])",
    "clip_grad_norm_(max_norm=1.0, parameters=opt.param_groups[0]['params'])",
    "g = opt.param_groups[0]\nclip_grad_norm_(list(g['params']), 1.0)",
]
READS += [
    "clip_grad_norm_(chain(*[g['params'] for g in opt.param_groups]), 1.0)",
    "clip_grad_norm_(itertools.chain.from_iterable(\n"
    "    g['params'] for g in opt.param_groups), 1.0)",
    "every = sum([g['params'] for g in opt.param_groups], [])\n"
    "clip_grad_norm_(every, 1.0)",
    "for i, g in enumerate(opt.param_groups):\n"
    "    for p, scale in zip(g['params'], scales[i]):\n"
    "        p.grad.mul_(scale)",
]
IN_A_CLASS = "class Trainer:\n"
READS += [
    f"{IN_A_CLASS}    @staticmethod\n"
    "    def clip(opt):\n"
    "        clip_grad_norm_(opt.param_groups[0]['params'], 1.0)",
    f"{IN_A_CLASS}    def fit(t):\n"
    "        def clip(t): clip_grad_norm_(t.param_groups[0]['params'], 1.0)\n"
    "        clip(t.optimizer)",
    f"{IN_A_CLASS}    def fit(t):\n"
    "        t = t.optimizer\n"
    "        clip_grad_norm_(t.param_groups[0]['params'], 1.0)",
]
READS_NONE = [
    "for g in opt.param_groups:\n    g['lr'] = 0.1",
    "for g in opt.param_groups:\n    for p in g['params']:\n        p.grad = None",
    "for g in opt.param_groups:\n    for p in g['params']:\n        p.data.clamp_(0)",
    "for g in self.param_groups:\n    for p in g['params']:\n        p.grad.mul_(0.5)",
    "class Mine(Optimizer):\n"
    "    @torch.no_grad()\n"
    "    def step(s, /, closure=None):\n"
    "        for g in s.param_groups:\n"
    "            for p in g['params']:\n"
    "                p.add_(p.grad, alpha=-g['lr'])",
    "for p in model.parameters():\n    p.grad.mul_(opt.param_groups[0]['lr'])",
    "clip_grad_norm_(model.parameters(), opt.param_groups[0]['lr'])",
    "for g in opt.param_groups:\n"
    "    for p in g['params']:\n"
    "        if p.grad is not None:\n"
    "            p.grad.data.zero_()",
    "ps = opt.param_groups[0]['params']\n"
    "print(len(ps))\n"
    "ps = list(model.parameters())\n"
    "clip_grad_norm_(ps, 1.0)",
    "n = len(opt.param_groups[0]['params'])\nclip_grad_norm_(model.parameters(), n)",
    "for g in opt.param_groups:\n"
    "    print(len(g['params']))\n"
    "    clip_grad_norm_(model.parameters(), 1.0)",
    "def no python",
]


@pytest.mark.parametrize("code", READS)
def test_gradients_of_groups_are_found(code: str) -> None:
    found = group_gradient_use("pass\n" + code)
    assert found is not None
    assert found.startswith("line ")


@pytest.mark.parametrize("code", READS_NONE)
def test_other_uses_of_groups_are_none(code: str) -> None:
    assert group_gradient_use(code) is None


USES = [
    "for g in opt.param_groups:\n    for p in g['params']:\n        p.data.clamp_(0)",
    "for p in opt.param_groups[0]['params']:\n    p.data = p.data * 2",
    "for p in opt.param_groups[0]['params']:\n    p.requires_grad = False",
    "for p in opt.param_groups[0]['params']:\n    p.requires_grad_(False)",
    "for p in opt.param_groups[0]['params']:\n    torch.nn.init.zeros_(p)",
    "loss += sum((p * p).sum() for g in opt.param_groups for p in g['params'])",
    "loss += sum(p.norm() for g in opt.param_groups for p in g['params'])",
    "mine = {p for g in opt.param_groups for p in g['params']}\n"
    "for p in model.parameters():\n    p.requires_grad_(p in mine)",
    "ids = set(id(p) for g in opt.param_groups for p in g['params'])\n"
    "rest = [p for p in model.parameters() if id(p) not in ids]",
    "ids = set(map(id, opt.param_groups[0]['params']))\nprint(id(p) in ids)",
    "print(p in opt.param_groups[0]['params'])",
    "def clamp(opt):\n"
    "    for p in opt.param_groups[0]['params']:\n"
    "        p.clamp_(0)\n"
    "m, opt, loader = prepare(m, opt, data)\n"
    "clamp(opt)",
]
FOLDS = (
    "for fold in range(3):\n"
    "    opt = SGD(m.parameters(), lr=0.1)\n"
    "    for p in opt.param_groups[0]['params']:\n"
    "        p.data.clamp_(0)\n"
    "    m, opt, loader = prepare(m, opt, data)"
)
USES += [
    FOLDS.replace("    opt = SGD(m.parameters(), lr=0.1)\n", ""),
    FOLDS.replace("for fold in range(3)", "while True").replace("    opt =", "    o ="),
    "for seed in range(2):\n"
    "    opt = SGD(m.parameters(), lr=0.1)\n"
    "    for fold in range(3):\n"
    "        print(p in opt.param_groups[0]['params'])\n"
    "        m, opt, loader = prepare(m, opt, data)",
]
USES_NONE = [
    FOLDS,
    "def main(opt):\n"
    "    for p in opt.param_groups[0]['params']:\n"
    "        nn.init.zeros_(p)\n"
    "    model, opt, loader = prepare(net, opt, data)",
    *(READS[0], READS[2], READS[3], *READS_NONE[:2], *READS_NONE[3:]),
    "n = sum(p.numel() for g in opt.param_groups for p in g['params'])",
    "for g in opt.param_groups:\n    for p in g['params']:\n        print(p.shape)",
    "for g in opt.param_groups:\n"
    "    for p in g['params']:\n"
    "        opt.state[p]['momentum_buffer'].zero_()",
    "for p in opt.param_groups[0]['params']:\n"
    "    p.data.clamp_(0)\n"
    "m, opt, loader = prepare(m, opt, data)",
    "print('lr' in opt.param_groups[0])",
]


LOOKAHEAD = """class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.slow = [[p.clone() for p in g["params"]] for g in self.param_groups]
    def step(self):
        self.optimizer.step()
        for g, slow in zip(self.param_groups, self.slow):
            for p, q in zip(g["params"], slow):
                q.data.add_(0.5 * (p.data - q.data))
                p.data.copy_(q.data)
"""


def test_a_class_around_an_optimizer_has_its_groups() -> None:
    prepare = "model, opt, loader = prepare(model, opt, data)\n"
    made = "opt = Lookahead(opt)\n"
    assert "self.slow = " in str(group_value_use(LOOKAHEAD + prepare + made))
    assert group_value_use(LOOKAHEAD + made + prepare) is None
    own = LOOKAHEAD.replace("optimizer.param_groups", "[dict(params=params)]")
    assert group_value_use(own + prepare + made) is None


@pytest.mark.parametrize("code", USES)
def test_parameters_of_groups_are_found(code: str) -> None:
    found = group_value_use("pass\n" + code)
    assert found is not None
    assert found.startswith("line ")


@pytest.mark.parametrize("code", USES_NONE)
def test_other_uses_than_of_parameters_are_none(code: str) -> None:
    assert group_value_use(code) is None


CLIPS = """
import torch.nn.functional as F

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
model, optimizer, loader = prepare(model, optimizer, samples, batch_size=8)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
    optimizer.step()
"""


@pytest.mark.timeout(120)
def test_they_are_refused_where_groups_hold_parts_without_gradients(lab: Lab) -> None:
    lab.train("ddp", CLIPS, live=False)
    with pytest.raises(RankError, match=r"line 10: .*these are the parts that this"):
        lab.train("zero2", CLIPS, live=False)
    clamps = CLIPS.replace(
        'torch.nn.utils.clip_grad_norm_(group["params"], 0.1)',
        '[p.data.clamp_(-0.1, 0.1) for p in group["params"]]',
    )
    lab.train("ddp", clamps, live=False)
    with pytest.raises(RankError, match=r"line 10: .*not the model's parameters"):
        lab.train("zero1", clamps, live=False)
