"""What a loop's text shows of the variables by which it goes on."""

from types import SimpleNamespace

import pytest
import torch

from labkit.rank.code.batch_sizes import use_of_batch_size
from labkit.rank.code.carried import carried_names
from labkit.rank.code.carried import count_of_microbatches
from labkit.rank.code.carried import taken_before
from labkit.rank.code.carried import taken_beside
from labkit.rank.code.kept_samples import count_by_dataset
from labkit.rank.code.kept_samples import kept_of_samples
from labkit.rank.training.unsaved import Unsaved
from labkit.rank.training.unsaved import described

BEGIN = "model, optimizer, loader = prepare(model, sgd, data, batch_size=64)\n"
STEP = (
    "        loss = F.cross_entropy(model(x), y)\n"
    "        loss.backward()\n"
    "        optimizer.step()\n"
    "        optimizer.zero_grad()\n"
)
EPOCHS = "for epoch in range(3):\n    for x, y in loader:\n" + STEP
NUMBERED = "for epoch in range(3):\n    for i, (x, y) in enumerate(loader):\n" + STEP

SHOWN_ALONE = {
    "nothing": EPOCHS,
    "a mean that is printed": (
        "for epoch in range(3):\n    total = seen = 0\n    for x, y in loader:\n" + STEP
        + "        total += loss.item() * len(x)\n        seen += len(x)\n"
        "    mean = total / seen\n    print(f'{mean:.2f}')\n    log(mean=mean)\n"
    ),
    "a number by which it prints": (
        "step = 0\n" + NUMBERED + "        step += 1\n"
        "        if step % 100 == 0:\n            print(step, i, loss.item())\n"
    ),
    "a number by which it prints a text that it formats": (
        NUMBERED + "        if i % args.log_interval == 0:\n"
        "            print('{}: {:.3f}'.format(i * len(x), loss.item()))\n"
    ),
    "a number by which it evaluates": (
        "step = 0\n" + EPOCHS + "        step += 1\n        if step % 100 == 0:\n"
        "            model.eval()\n            accuracy = evaluate(model, test_set)\n"
        "            log(accuracy=accuracy)\n            model.train()\n"
    ),
    "a bar": (
        "bar = tqdm(total=300)\n" + EPOCHS + "        bar.update(1)\n"
        "        bar.set_postfix(loss=loss.item())\n"
    ),
    "the best that is printed": (
        "best = 1e9\n" + EPOCHS + "    found = validate(model)\n"
        "    if found < best:\n        best = found\n        print(best)\n"
    ),
    "a history": (
        "history = {'loss': []}\n" + EPOCHS
        + "        history['loss'].append(loss.item())\n"
    ),
    "what a function returns": (
        "def train(loader):\n    total = 0\n    for x, y in loader:\n" + STEP
        + "        total += loss.item()\n    return total\n"
        "for epoch in range(3):\n    print(train(loader))\n"
    ),
}  # fmt: skip
CARRIED = {
    "the best that is saved": (
        "best = 1e9\n" + EPOCHS + "    found = validate(model)\n"
        "    if found < best:\n        best = found\n"
        "        torch.save(model.state_dict(), 'best.pt')\n",
        {"best"},
    ),
    "a rate by the step": (
        "step = 0\nfor epoch in range(3):\n    for x, y in loader:\n"
        "        for group in optimizer.param_groups:\n"
        "            group['lr'] = 0.1 * min(1, step / 10)\n" + STEP
        + "        step += 1\n",
        {"step"},
    ),
    "a weight of the loss": (
        "step = 0\nfor epoch in range(3):\n    for x, y in loader:\n"
        "        beta = min(1.0, step / 100)\n        out, kl = model(x)\n"
        "        loss = F.mse_loss(out, x) + beta * kl\n        loss.backward()\n"
        "        optimizer.step()\n        step += 1\n",
        {"step"},
    ),
    "an end": ("step = 0\nwhile step < 9:\n    for x, y in loader:\n" + STEP
               + "        step += 1\n", {"step"}),
    "an end in a loop with a function": (
        "def train(x, y):\n    loss = F.mse_loss(model(x), y)\n    loss.backward()\n"
        "    optimizer.step()\nstep = 0\nfor x, y in loader:\n    train(x, y)\n"
        "    step += 1\n    if step == 9:\n        break\n",
        {"step"},
    ),
    "patience": (
        "best, bad = 1e9, 0\n" + EPOCHS + "    found = validate(model)\n"
        "    if found < best:\n        best, bad = found, 0\n"
        "    else:\n        bad += 1\n    if bad > 3:\n        break\n",
        {"best", "bad"},
    ),
    "patience by a pattern": (
        "bad = 0\n" + EPOCHS + "    match validate(model):\n"
        "        case found if found < 0.1:\n            pass\n"
        "        case _:\n            bad += 1\n    if bad > 3:\n        break\n",
        {"bad"},
    ),
    "the best weights": (
        "best, kept = 1e9, None\n" + EPOCHS + "    found = validate(model)\n"
        "    if found < best:\n        best = found\n"
        "        kept = copy.deepcopy(model.state_dict())\n"
        "model.load_state_dict(kept)\n",
        {"best"},
    ),
    "a baseline": (
        "baseline = 0.0\nfor x, y in loader:\n    reward = score(model(x), y)\n"
        "    loss = -(reward - baseline).mean()\n    loss.backward()\n"
        "    optimizer.step()\n"
        "    baseline = 0.9 * baseline + 0.1 * reward.mean().item()\n",
        {"baseline"},
    ),
    "a queue": (
        "queue = []\nfor x, y in loader:\n    keys = model(x)\n"
        "    loss = contrast(keys, queue)\n    loss.backward()\n"
        "    optimizer.step()\n    queue.append(keys.detach())\n",
        {"queue"},
    ),
    "a mean for a schedule": (
        "for epoch in range(3):\n    total = 0\n    for x, y in loader:\n" + STEP
        + "        total += loss.item()\n    scheduler.step(total)\n",
        {"total"},
    ),
    "an attribute": (
        "class Trainer:\n    def train(self):\n        for x, y in self.loader:\n"
        "            set_rate(self.optimizer, self.step)\n"
        "            self.loss(x, y).backward()\n            self.optimizer.step()\n"
        "            self.step += 1\n",
        {"self.step"},
    ),
}  # fmt: skip
NUMBERS = {
    "steps of its own": (
        "for i, (x, y) in enumerate(loader):\n    model(x).sum().backward()\n"
        "    if i % 4 == 0:\n        optimizer.step()\n",
        {"i"},
    ),
    "a schedule within an epoch": (
        NUMBERED + "        scheduler.step(epoch + i / len(loader))\n",
        {"i"},
    ),
    "from where it begins": (
        NUMBERED.replace("(loader)", "(loader, loader.position.batch)")
        + "        scheduler.step(epoch + i / len(loader))\n",
        set(),
    ),
    "batches that it asks for": (
        "batches = iter(loader)\nfor step in range(200):\n    x, y = next(batches)\n"
        "    model(x).sum().backward()\n    optimizer.step()\n",
        {"step"},
    ),
    "from the steps taken": (
        "batches = iter(loader)\nfor step in range(loader.steps_taken, 200):\n"
        "    x, y = next(batches)\n    model(x).sum().backward()\n"
        "    optimizer.step()\n",
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", SHOWN_ALONE.values(), ids=SHOWN_ALONE)
def test_what_is_only_shown_is_not_carried(text: str) -> None:
    assert carried_names(BEGIN + text)[:3] == (set(), set(), set())


@pytest.mark.parametrize(("text", "names"), CARRIED.values(), ids=CARRIED)
def test_what_a_loop_trains_by_is_found(text: str, names: set[str]) -> None:
    assert carried_names(BEGIN + text)[:3] == (names, set(), set())


@pytest.mark.parametrize(("text", "names"), NUMBERS.values(), ids=NUMBERS)
def test_the_numbers_of_batches_are_found(text: str, names: set[str]) -> None:
    carried = carried_names(BEGIN + text)
    assert carried.numbers | carried.rounds == names


OTHER = "others = DataLoader(unlabelled, 64)\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (EPOCHS.replace("in loader", "in zip(loader, others)"), "line 4: for x, y"),
        ("more = iter(cycle(others))\n" + EPOCHS, "line 3: more = iter("),
        (EPOCHS + "    for x, y in others:\n        model(x)\n", None),
        (EPOCHS + "    for x, z in zip(others, others):\n        model(x)\n", None),
        ("batches = iter(loader)\n" + EPOCHS, None),
    ],
)
def test_a_loader_beside_is_found_where_a_loop_trains_on_it(
    text: str, found: str | None
) -> None:
    line = taken_beside(BEGIN + OTHER + text)
    assert line == found or (line and found and line.startswith(found))


ACCURACY = (
    "for epoch in range(3):\n    correct = seen = 0\n    for x, y in loader:\n" + STEP
    + "        correct += (model(x).argmax(1) == y).sum().item()\n"
    "        seen += len(x)\n"
)  # fmt: skip
PASS = "for x, y in loader:\n    counts += torch.bincount(y, minlength=9)\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            ACCURACY + "    print(correct / len(loader.dataset))\n",
            "line 11: correct / ",
        ),
        (ACCURACY + "    correct /= len(data)\n", "line 11: correct /= len(data)"),
        ("size = len(data)\n" + ACCURACY + "    print(correct / size)\n", "line 12: "),
        (ACCURACY + "    print(correct / seen, seen / len(loader))\n", None),
        (
            ACCURACY.replace(".item()", "") + "    dist.all_reduce(correct)\n"
            "    print(correct / len(loader.dataset))\n",
            None,
        ),
        (
            "for x, y in test_loader:\n    correct += (model(x) == y).sum()\n"
            "print(correct / len(test_loader.dataset))\n" + EPOCHS,
            None,
        ),
    ],
)
def test_counts_of_a_rank_by_the_whole_dataset(text: str, found: str | None) -> None:
    said = count_by_dataset(BEGIN + text)
    assert said == found if found is None else str(said).startswith(found)


LOADER = "data = DataLoader(dataset, batch_size=64)\n" + BEGIN


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LOADER + ACCURACY + "    print(correct / len(data))\n", None),
        (
            LOADER.replace(", loader =", ", data =")
            + ACCURACY.replace("loader", "data")
            + "    print(correct / len(data))\n",
            None,
        ),
        (LOADER + ACCURACY + "    print(correct / len(dataset))\n", "line 12: "),
        (LOADER + ACCURACY + "    print(correct / len(data.dataset))\n", "line 12: "),
    ],
)
def test_sums_over_the_batches_of_a_loader(text: str, found: str | None) -> None:
    said = count_by_dataset(text, is_loader=True)
    assert said == found if found is None else str(said).startswith(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            PASS + "loss_fn = nn.CrossEntropyLoss(1 / counts)\n"
            + EPOCHS.replace("F.cross_entropy", "loss_fn"),
            "line 2: for x, y in loader:",
        ),
        (PASS + "print(counts)\n" + EPOCHS, None),
        (PASS.replace("loader", "DataLoader(data, 64)") + EPOCHS, None),
        ("for x, y in loader:\n    model(x)\n" + EPOCHS, None),
    ],
)  # fmt: skip
def test_what_is_taken_of_a_rank_before_it_trains(text: str, found: str | None) -> None:
    assert taken_before(BEGIN + text) == found


def test_a_count_of_microbatches_by_which_a_loop_trains() -> None:
    text = BEGIN + CARRIED["a weight of the loss"][0]
    assert count_of_microbatches(text) == "line 10: step += 1"
    once = "        if not optimizer.held_back:\n            step += 1\n"
    assert count_of_microbatches(text.replace("        step += 1\n", once)) is None
    mean = CARRIED["a mean for a schedule"][0].replace("total = 0", "total = n = 0")
    mean = mean.replace("    scheduler.step(total)", "        n += 1\n    STEP")
    mean = BEGIN + mean.replace("STEP", "scheduler.step(total / n)")
    assert count_of_microbatches(mean) is None
    assert count_of_microbatches(mean + "    weigh(n)\n") == "line 10: n += 1"
    shown = BEGIN + SHOWN_ALONE["a number by which it prints"]
    assert count_of_microbatches(shown) is None


def test_a_count_of_samples_by_which_a_loop_trains() -> None:
    rate = (
        "        rate = schedule(seen)\n"
        "        for group in optimizer.param_groups:\n            group['lr'] = rate\n"
    )
    count = "        seen += len(x)\n"
    text = BEGIN + "seen = 0\n" + EPOCHS
    assert use_of_batch_size(text + rate + count) == "line 12: seen += len(x)"
    assert use_of_batch_size(text + count + "        print(seen)\n") is None
    mean = "        total += loss.item() * len(x)\n    scheduler.step(total / seen)\n"
    assert use_of_batch_size(text + count + mean) is None


@pytest.mark.parametrize(
    "text",
    [
        "() = prepare()\n",
        "found, = prepare()\n",
        "for () in enumerate(loader):\n    loss.backward()\n",
    ],
)
def test_texts_that_unpack_nothing_are_read(text: str) -> None:
    for read in (carried_names, taken_before, kept_of_samples, use_of_batch_size):
        assert not any(read(BEGIN + text) or ())


def test_an_attribute_that_cannot_be_read_ends_no_run() -> None:
    class Trainer:
        @property
        def step(self) -> int:
            raise RuntimeError

    self = Trainer()
    code = BEGIN + CARRIED["an attribute"][0]
    assert Unsaved(lambda: code).variables() == {}
    self = SimpleNamespace(step=3)  # noqa: F841
    assert Unsaved(lambda: code).variables() == {"self.step": "3"}


def test_a_quantized_tensor_is_described() -> None:
    found = {
        described(torch.quantize_per_tensor(torch.tensor([value] * 9), 0.1, 0, kind))
        for value in (0.0, 1.0, 1.0)
        for kind in [torch.qint8]
    }
    assert len(found) == 2


def test_what_a_cell_sets_after_its_first_batch_is_late() -> None:
    text = (
        "batches = iter(loader)\nbest = 9\nx, y = next(batches)\nstep = 0\n"
        "while step < best:\n    model(x).sum().backward()\n    optimizer.step()\n"
        "    x, y = next(batches)\n    step += 1\n    best -= 1\n"
    )
    carried = carried_names(BEGIN + text)
    assert carried.changed == {"x", "step", "best"}
    assert carried.late == {"x", "step"}
