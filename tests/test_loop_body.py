"""What a loop does for every batch, read from its text."""

import functools
from typing import Any

import pytest

from labkit.rank.code.batch_sizes import update_by_batch_size
from labkit.rank.code.batch_sizes import use_of_batch_size
from labkit.rank.code.exchanges import sum_over_all
from labkit.rank.code.kept_samples import kept_of_samples
from labkit.rank.code.loop_body import extra_work
from labkit.rank.code.trees import MARK
from labkit.rank.training import whole_text
from labkit.rank.training.whole_text import with_functions

PREPARE = "model, optimizer, loader = prepare(model, optimizer, data)\n"
STEP = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu"):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    total += loss.item()
"""


def test_a_plain_loop_does_nothing_else() -> None:
    assert extra_work(PREPARE + STEP) is None
    assert extra_work(PREPARE + STEP + "    hidden.requires_grad = True") is None
    assert extra_work(PREPARE + STEP + "    [g] = torch.autograd.grad(l, h)") is None
    assert extra_work("this is no Python") is None


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("ema.update_parameters(model)", "line 12: ema.update_parameters(model)"),
        ("if total > 3:\n        break", "line 13: break"),
        (
            "with torch.no_grad():\n        w.mul_(0.9)",
            "line 12: with torch.no_grad():",
        ),
        ("losses.append(loss)", "line 12: losses.append(loss)"),
        ("ema.update()", "line 12: ema.update()"),
        ("copies.update(model)", "line 12: copies.update(model)"),
        ("helper.update()", "line 12: helper.update()"),
        ("p.data = q", "line 12: p.data = q"),
    ],
)
def test_other_work_is_found(work: str, found: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) == found


def test_a_part_of_a_stream_is_found() -> None:
    loop = "for x, y in islice(chain.from_iterable(repeat(loader)), 9):\n"
    found = "line 2: for x, y in islice(chain.from_iterable(repeat(loader)), 9):"
    assert extra_work(f"{PREPARE}{loop}    loss.backward()") == found
    by_name = "for x, y in itertools.islice(stream, 9):\n    loss.backward()"
    assert extra_work(PREPARE + by_name) == "line 2: " + by_name.splitlines()[0]


def test_a_number_of_rounds_is_found() -> None:
    loop = "for step in range(9):\n    x, y = next(batches)\n    optimizer.step()"
    assert extra_work(PREPARE + loop) == "line 2: for step in range(9):"


TRAINER = """
class Trainer:
    def train(self, num_epochs):
        for self.epoch in range(num_epochs):
            for self.number, (x, y) in enumerate(self.train_loader):
                self.loss = self.loss_fn(self.model(x), y)
                self.optimizer.zero_grad()
                self.loss.backward()
                self.optimizer.step()
                self.total_loss += self.loss.item()
"""


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("pass", None),
        ("self.ema.update(self.model)", "line 11: self.ema.update(self.model)"),
        ("if self.number == 9: break", "line 11: break"),
        (
            "for g in self.optimizer.param_groups: g['lr'] *= 0.9",
            "line 11: g['lr'] *= 0.9",
        ),
    ],
)
def test_other_work_in_a_class_that_has_the_loader(
    work: str, found: str | None
) -> None:
    assert extra_work(TRAINER + 16 * " " + work) == found


def test_a_phase_of_an_epoch_is_no_other_work() -> None:
    loop = (
        "for x, y in loaders[phase]:\n"
        "    loss = loss_fn(model(x), y)\n"
        "    if phase == 'train':\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
    )
    assert extra_work(loop) is None
    ema = "line 6: ema.update(model)"
    assert extra_work(loop + "        ema.update(model)") == ema


def test_parts_of_a_batch_that_the_loop_cuts_itself_are_no_other_work() -> None:
    loop = (
        "for x, y in self.loader:\n"
        "    for part, target in zip(x.chunk(2), y.chunk(2)):\n"
        "        loss_fn(model(part), target).backward()\n"
    )
    assert extra_work(loop) is None


@pytest.mark.parametrize(
    "work",
    [
        "for output in outputs:\n        loss = loss + loss_fn(output, y)",
        "for t in range(9):\n        if t > 3:\n            break\n        h = cell(h)",
        "while error > 1:\n        error = error / 2",
        "losses.update(loss.item(), len(x))",
        "top1.update(accuracy, n=len(x))",
        "bar.update()",
    ],
)
def test_a_loop_that_only_computes_is_no_other_work(work: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) is None


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("for p in params:\n        p.data = q", "line 13: p.data = q"),
        ("for e in es:\n        e.mul_(0.9)", "line 13: e.mul_(0.9)"),
        ("for _ in range(2):\n        sgd.step()", "line 12: for _ in range(2):"),
    ],
)
def test_other_work_within_a_loop_is_found(work: str, found: str) -> None:
    assert extra_work(PREPARE + STEP + "    " + work) == found


LOOP = """
for number, (x, y) in enumerate(loader):
    x = x.to(device)
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    {}
    loss.backward()
    {}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("loss = loss * len(x)", "", "line 7: loss = loss * len(x)"),
        ("loss = 0.1 * x.size(0) * loss + 1", "", "line 7: loss = 0.1 * x.size(0)"),
        ("loss *= y.shape[0]", "", "line 7: loss *= y.shape[0]"),
        ("seen += len(x)", "if seen > 99: break", "line 9: if seen > 99:"),
        ("n = y.numel()", "group['lr'] = 0.1 / n", "line 9: group['lr'] = 0.1 / n"),
        ("seen += len(x)", "scheduler.step(seen)", "line 9: scheduler.step(seen)"),
        ("", "p.grad.div_(len(x))", "line 9: p.grad.div_(len(x))"),
        ("loss.backward(torch.tensor(1.0 * len(x)))", "", "line 7: loss.backward("),
    ],
)
def test_what_trains_with_the_size_of_a_part_is_found(
    before: str, after: str, found: str
) -> None:
    code = PREPARE + LOOP.format(before, after)
    assert str(use_of_batch_size(code)).startswith(found)
    assert use_of_batch_size(code + "dist.all_reduce(seen)") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loss = loss_fn(model(x), y, reduction='sum') / len(x)", ""),
        ("loss = (loss * weight).sum() / x.size(0)", ""),
        ("hidden = torch.zeros(1, len(x), 8); loss = rnn(x, hidden)", ""),
        ("loss = model(x.view(len(x), -1)).mean() * 0.5", ""),
        ("total += loss.item() * len(x); seen += len(x)", "log(mean=total / seen)"),
        ("", "if number == len(loader) - 1: break"),
        ("width = x.shape[1]; loss = loss * width", ""),
        ("", "scheduler.step(number)"),
        ("stats['n'] = len(x); counts['seen'] += y.size(0)", "bar.step(len(x))"),
    ],
)
def test_other_uses_of_a_size_are_left_alone(before: str, after: str) -> None:
    assert use_of_batch_size(PREPARE + LOOP.format(before, after)) is None
    assert use_of_batch_size("this is no Python") is None


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("dist.all_reduce(n)", "line 1: dist.all_reduce(n)"),
        (
            "work = torch.distributed.all_reduce(n, op=dist.ReduceOp.SUM)",
            "line 1: work",
        ),
        ("all_reduce(n); loss = total / n", "line 1: all_reduce(n)"),
        ("dist.all_reduce(n)\nshare = n / len(data)", "line 1: dist.all_reduce(n)"),
        ("dist.all_gather(parts, x)", "line 1: dist.all_gather(parts, x)"),
        ("dist.all_gather(parts, x, loader.group)", None),
        ("dist.all_reduce(n, group=loader.group)", None),
        ("dist.all_reduce(n, dist.ReduceOp.MAX)", None),
        ("dist.all_reduce(loss, op=dist.ReduceOp.AVG)", None),
        ("dist.all_reduce(loss)\nloss /= world_size", None),
        ("dist.all_reduce(loss)\nloss.div_(dist.get_world_size())", None),
        ("dist.all_reduce(found)\nlog(accuracy=found[0] / found[1])", None),
        ("dist.all_reduce(right)\ndist.all_reduce(n)\nprint(right.item() / n)", None),
        ("this is no Python", None),
    ],
)
def test_a_sum_over_all_ranks_that_becomes_no_mean_is_found(
    code: str, found: str | None
) -> None:
    line = sum_over_all(code)
    assert line is None if found is None else str(line).startswith(found)


def test_an_update_by_the_size_of_a_part_is_found() -> None:
    epoch = """
def train(net, batches):
    for X, y in batches:
        l = loss(net(X), y)
        l.sum().backward()
        metric.add(l.sum(), y.numel())
        updater(X.shape[0])
"""
    assert update_by_batch_size(epoch) == "line 7: updater(X.shape[0])"
    assert update_by_batch_size(epoch.replace("X.shape[0]", "batch_size")) is None
    assert update_by_batch_size(epoch.replace("updater(", "meter.count(")) is None
    assert update_by_batch_size(epoch + "dist.all_reduce(size)") is None
    assert update_by_batch_size("this is no Python") is None


def outer() -> Any:
    def inner(loader: Any) -> None:
        for _ in loader:
            used()

    return functools.partial(inner)


def used() -> None:
    used()


def unread() -> None:
    """By a cell whose function has a variable of this name."""


def test_what_a_cell_uses_of_earlier_cells_is_part_of_its_text() -> None:
    names = {"other": outer(), "unused": used, "len": len, "number": 3}
    names["its_own"] = unread
    text = with_functions("other(len, number)", names, is_ours=__file__.__eq__)
    assert text.count("# labkit: of an earlier cell, ") == 2
    assert text.endswith("of an earlier cell, used\ndef used() -> None:\n    used()")
    assert with_functions("def other(): pass\nother()", names, __file__.__eq__) == (
        "def other(): pass\nother()"
    )
    assert with_functions("other()", names, is_ours=lambda file: False) == "other()"
    local = "def f(its_own):\n    return its_own()"
    assert with_functions(local, names, is_ours=__file__.__eq__) == local
    found = extra_work(
        PREPARE + with_functions("other(loader)", names, is_ours=__file__.__eq__)
    )
    assert found == "line 4 of outer: used()"


def test_of_a_big_project_only_so_much_is_read_with_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole_text, "MAX_CHARACTERS", 60)
    text = with_functions(
        "unread(used)", {"unread": unread, "used": used}, __file__.__eq__
    )
    assert "def unread" not in text
    assert "def used" in text


def test_an_evaluation_of_what_it_is_given_is_no_loop_of_steps() -> None:
    """As of the user's module, in which a loader is called `loader`."""
    loop = "for x in loader:\n        found.append(x)"
    function = f"@torch.no_grad()\ndef test(model, loader):\n    {loop}"
    block = f"with torch.no_grad():\n    {loop}"
    for each in (function, block):
        assert extra_work(f"{PREPARE}{STEP}\n{each}") is None
    assert extra_work(f"{PREPARE}{STEP}    found.append(x)") is not None


def test_words_of_a_module_that_does_not_train_hide_no_use_of_a_size() -> None:
    sizes = STEP.replace(
        "    loss.backward()", "    loss = loss * len(x)\n    loss.backward()"
    )
    assert use_of_batch_size(PREPARE + sizes) is not None
    data = f"{MARK}Data\nclass Data:\n    def __len__(self): return self.num_samples"
    assert use_of_batch_size(f"{PREPARE}{sizes}\n{data}") is not None
    mean = f"{MARK}mean\ndef mean(x): return all_reduce(x)"
    assert use_of_batch_size(f"{PREPARE}{sizes}\n{mean}") is None
    train = f"{MARK}train\ndef train(): prepare(a, b, c, reduction='sum')"
    assert use_of_batch_size(f"{PREPARE}{sizes}\n{train}") is None


KEEPING = """
model, optimizer, loader = prepare(model, optimizer, data)
kept = make()
for step, (x, y) in enumerate(loader):
    out = model(x)
    {before}
    loss = compare(out, y, kept)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ("kept.append(out.detach())", "line 11: kept.append(out.detach())"),
        ("kept = 0.9 * kept + 0.1 * y.mean()", "line 11: kept = 0.9 * kept + 0.1"),
        ("kept = torch.cat([out, kept])[:64]", "line 11: kept = torch.cat("),
        ("kept[at : at + len(out)] = out", "line 11: kept[at:at + len(out)] = out"),
        ("kept += 0.1 * loss.item()", "line 11: kept += 0.1 * loss.item()"),
        ("kept = kept.lerp(out.mean(0), 0.1)", "line 11: kept = kept.lerp("),
        ("kept = [0.9 * a + b for a, b in zip(kept, out)]", "line 11: kept = [0.9"),
        ("kept.mul_(0.9).add_(0.1 * out.mean(0))", "line 11: kept.mul_(0.9).add_"),
        ("kept['mean'] = 0.9 * kept['mean'] + y.mean()", "line 11: kept['mean'] = 0.9"),
        ("kept[:8].copy_(out)", "line 11: kept[:8].copy_(out)"),
        ("kept.copy_(0.9 * kept + out.mean(0))", "line 11: kept.copy_(0.9 * kept"),
        (
            "with torch.no_grad():\n        mean = out.mean(0)\n"
            "        kept.lerp_(mean, 0.1)",
            "line 13: kept.lerp_(mean, 0.1)",
        ),
        (
            "kept = kept + 0.1 * loss.item()\n    kept = min(max(kept, 0), 1)",
            "line 11: kept = kept + 0.1 * loss.item()",
        ),
        ("kept.update(out.mean(), len(x))", "line 11: kept.update(out.mean(), len(x))"),
        ("kept.push(x, out.detach())", "line 11: kept.push(x, out.detach())"),
        ("kept = max(0, min(1, kept + loss.item()))", "line 11: kept = max(0, min("),
        ("kept = float(np.clip(kept + loss.item(), 0, 1))", "line 11: kept = float("),
        ("kept = (0.9 * kept + out.mean(0)).clamp(-1, 1)", "line 11: kept = (0.9 * k"),
        ("kept = y if kept is None else 0.9 * kept + y", "line 11: kept = y if kept"),
        (
            "if kept is None:\n        kept = y.mean(0)\n"
            "    else:\n        kept = 0.9 * kept + y.mean(0)",
            "line 14: kept = 0.9 * kept + y.mean(0)",
        ),
        (
            "kl = out.mean().item()\n    if kl > 0.02:\n        kept *= 2",
            "line 13: kept *= 2",
        ),
    ],
)
def test_what_a_loop_keeps_of_its_samples_is_found(after: str, found: str) -> None:
    code = KEEPING.format(before="pass", after=after)
    assert str(kept_of_samples(code)).startswith(found)
    assert kept_of_samples(code + "dist.all_gather(keys, out)") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kept = []", "kept.append(out)"),  # of one batch
        ("kept: list = []", "kept.append(out)"),
        ("kept.clear()", "kept.append(out)"),
        ("del kept[:]", "kept.append(out)"),
        ("kept.zero_()", "kept.add_(out.mean(0))"),
        ("kept.copy_(x)", "pass"),
        ("kept['task'] = out.mean()", "pass"),
        ("pass", "losses.append(loss.item())"),  # is not in the loss
        ("pass", "total = 0.9 * total + 0.1 * loss.item()"),
        ("pass", "kept = min(1.0, kept + 0.01)"),  # is of no samples
        ("pass", "kept *= 0.9"),
        ("out, kept = model(x, kept)", "kept = kept.detach()"),  # each sample's own
        ("out, kept = model(x, kept)", "kept = kept * (1 - y)"),
        ("out, kept = model(x, kept)", "kept = [each.detach() for each in kept]"),
        ("loss = loss + 0.1 * out.mean()", "pass"),  # of several batches
        ("weights = [w for w in kept]", "weights.append(out)"),
        ("pass", "if step % 2 == 1:\n        kept *= 0.9"),
        ("pass", "meter.update(loss.item(), len(x))"),
        ("pass", "kept.update(model, step)"),  # a teacher
        ("kept = {}", "kept.update(mean=out.mean())"),
        ("kept = kept + out.mean()", "if step % 2:\n        kept = 0"),
    ],
)
def test_what_is_of_one_batch_or_none_is_not_kept(before: str, after: str) -> None:
    assert kept_of_samples(KEEPING.format(before=before, after=after)) is None
    assert kept_of_samples("this is no Python") is None


def test_what_divides_a_loss_is_found() -> None:
    code = KEEPING.format(before="pass", after="kept = 0.9 * kept + loss.item()")
    code = code.replace("loss.backward()", "(loss / kept).backward()")
    code = code.replace("compare(out, y, kept)", "compare(out, y)")
    assert str(kept_of_samples(code)).startswith("line 11: kept = 0.9 * kept + loss")


def test_what_a_class_keeps_is_found() -> None:
    code = """
class Trainer:
    def fit(self):
        for x, y in self.loader:
            loss = compare(self.model(x) - self.center, y)
            loss.backward()
            self.center = 0.9 * self.center + 0.1 * y.mean(0)
            self.seen += len(x)
"""
    found = "line 7: self.center = 0.9 * self.center + 0.1 * y.mean(0)"
    assert kept_of_samples(code) == found
