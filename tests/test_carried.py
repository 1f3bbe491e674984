"""What a loop's text shows of the variables by which it goes on."""

import pytest

from labkit.rank.code.carried import carried_names

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
    "a number by which it evaluates": (
        "step = 0\n" + EPOCHS + "        step += 1\n        if step % 100 == 0:\n"
        "            model.eval()\n            accuracy = evaluate(model, test_set)\n"
        "            log(accuracy=accuracy)\n            model.train()\n"
    ),
    "a bar": (
        "bar = tqdm(total=300)\n" + EPOCHS + "        bar.update(1)\n"
        "        bar.set_postfix(loss=loss.item())\n"
    ),
    "the best that is saved": (
        "best = 1e9\n" + EPOCHS + "    found = validate(model)\n"
        "    if found < best:\n        best = found\n"
        "        torch.save(model.state_dict(), 'best.pt')\n"
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
    assert carried_names(BEGIN + text) == (set(), set())


@pytest.mark.parametrize(("text", "names"), CARRIED.values(), ids=CARRIED)
def test_what_a_loop_trains_by_is_found(text: str, names: set[str]) -> None:
    assert carried_names(BEGIN + text) == (names, set())


@pytest.mark.parametrize(("text", "names"), NUMBERS.values(), ids=NUMBERS)
def test_the_numbers_of_batches_are_found(text: str, names: set[str]) -> None:
    assert carried_names(BEGIN + text)[1] == names
