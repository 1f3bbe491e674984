"""What a cell has one rank do alone, read from its text."""

from textwrap import indent

import pytest

from labkit.rank.code.rank_guards import lonely_use

PREPARE = "net, optimizer, loader = prepare(net, optimizer, data)\n"


@pytest.mark.parametrize(
    "use",
    [
        "if rank == 0:\n    evaluate(net)",
        "if rank == 0:\n    torch.save(net.state_dict(), 'net.pt')",
        "if not rank:\n    with torch.no_grad():\n        loss = net(x)",
        "if dist.get_rank() == 0:\n    print(net.head.weight.norm())",
        "if rank != 0:\n    pass\nelse:\n    evaluate(model=net)",
        "rank == 0 and evaluate(net)",
        "found = evaluate(net) if rank == 0 else None",
        "def test():\n    return net(x)\nif rank == 0:\n    test()",
        "main = rank == 0\nif main:\n    evaluate(net)",
        "main = False\nmain = not dist.get_rank()\nmain and evaluate(net)",
        "args.chief = int(os.environ['RANK']) == 0\nif args.chief:\n    net(x)",
        "config = {'main': rank == 0}\nif config['main']:\n    net(x)",
        "config = SimpleNamespace(main=rank == 0)\nif config.main:\n    net(x)",
        "def first():\n    return rank == 0\nif first():\n    net(x)",
        "first = lambda: dist.get_rank() == 0\nif first():\n    net(x)",
        "if rank != 0:\n    pass\nelif epoch:\n    net(x)",
        "def test(model):\n    if rank != 0:\n        return\n    model(x)\ntest(net)",
        "if args.local_rank == 0:\n    net(x)",
        "class Callback:\n    def __init__(s): s.main = dist.get_rank() == 0\n"
        "    def at_end(s, m):\n        if s.main:\n            m(x)\n"
        "for each in [Callback()]:\n    each.at_end(net)",
        "class Saver:\n    def __init__(self, main): self.main = main\n"
        "    def __call__(self, m):\n        if not self.main: return\n"
        "        keep(m.state_dict())\nsaver = Saver(rank == 0)\nsaver(net)",
        "@dataclass\nclass Config:\n    main: bool = False\n"
        "config = Config(main=rank == 0)\nif config.main:\n    net(x)",
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "    @property\n    def main(self): return rank == 0\n"
        "    def test(self): return self.model(x)\n"
        "    def fit(self):\n        if self.main: self.test()\n"
        "Trainer(net).fit()",
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "    def test(self): return self.model(x)\n"
        "trainer = Trainer(net)\nif rank == 0:\n    trainer.test()",
    ],
)
def test_what_needs_the_model_on_one_rank_is_found(use: str) -> None:
    assert lonely_use(PREPARE + use) is not None


@pytest.mark.parametrize(
    "use",
    [
        "if rank == 0:\n    print(net)",
        "if rank == 0:\n    print(loss.item())",
        "if rank == 0:\n    net.eval()",
        "if epoch == 0:\n    evaluate(net)",
        "evaluate(net)",
        "this is no Python",
        "main = epoch == 0\nif main:\n    net(x)",
        "main = rank == 0\nif main:\n    log(loss=loss)\nnet(x)",
        "part = data[rank]\nif len(part) > 1:\n    net(part)",
        "def lora(layer, rank):\n    if rank > 0:\n        net(layer)\nlora(x, 8)",
        "kept[epoch] = net\nif rank == 0:\n    save(history[epoch])",
        "rank = 4\nif rank > 2:\n    net(x)",
        "def test(model, main):\n    model(x)\n    if main:\n        print(1)\n"
        "test(net, rank == 0)",
        "def test(model): return model(x)\ntest(net)\nif rank == 0:\n    test(other)",
        "class Log:\n    def __init__(self): self.model = 'mlp'\n"
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "Trainer(net)\nlog = Log()\nif rank == 0:\n    print(log.model + 's')",
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "    def step(self): self.model(x)\n"
        "trainer = Trainer(net)\nif rank == 0:\n    scheduler.step()",
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "    def say(self):\n        if rank == 0: print(self.model)\nTrainer(net)",
        "class Trainer:\n    def __init__(self, model): self.model = model\n"
        "    def keep(self):\n        if rank == 0: write(self.model)\n"
        "    def fit(self): self.model(x)\nTrainer(net).fit()",
        "def test():\n    first = rank == 0\nfirst = True\nif first:\n    net(x)",
    ],
)
def test_what_needs_no_values_or_is_on_all_ranks_is_not(use: str) -> None:
    assert lonely_use(PREPARE + use) is None


def test_gradients_alone() -> None:
    save = PREPARE + "if rank == 0:\n    torch.save(net.state_dict(), 'net.pt')"
    norms = "if rank == 0:\n    print([p.grad.norm() for p in net.parameters()])"
    assert lonely_use(save, gradients_alone=True) is None
    found = lonely_use(PREPARE + norms, gradients_alone=True)
    assert found == "line 3: print([p.grad.norm() for p in net.parameters()])"


def test_a_model_that_a_trainer_keeps() -> None:
    trainer = """class Trainer:
    def __init__(self, model, data):
        self.model, self.optimizer, self.loader = prepare(model, optimizer, data)
        self.rank = dist.get_rank()
    def fit(self):
        if self.rank == 0:
            save(self.model)
Trainer(net, data).fit()"""
    assert lonely_use(trainer) == "line 7: save(self.model)"


@pytest.mark.parametrize(
    ("use", "is_found"),
    [
        ("if rank == 0:\n    next(iter(loader))", True),
        ("main = rank == 0\nif main:\n    for x, y in loader: show(x)", True),
        ("def look(batches):\n    if rank == 0: max(batches)\nlook(loader)", True),
        ("for x in tqdm(loader) if rank == 0 else loader: step(x)", False),
        ("if rank == 0:\n    loader = tqdm(loader)\nfor x in loader: step(x)", False),
        ("if rank == 0:\n    for i in range(len(loader)): print(i)", False),
        ("if rank == 0:\n    print(len(loader), loader.dataset[0])", False),
        ("if rank == 0:\n    evaluate(net)", False),
        ("next(iter(loader))", False),
        ("if rank == 0:\n    print(max(loss for loader, loss in history))", False),
    ],
)
def test_batches_that_one_rank_takes(use: str, is_found: bool) -> None:
    assert (lonely_use(PREPARE + use, of_loader=True) is not None) is is_found


LOOK = "if rank == 0:\n    net(next(iter(loader)))\n"


@pytest.mark.parametrize("of_loader", [True, False])
@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        (LOOK + PREPARE, False),
        (PREPARE + LOOK, True),
        ("def look():\n" + indent(LOOK, "    ") + PREPARE + "look()", True),
        ("def main():\n" + indent(LOOK + PREPARE, "    "), False),
        ("for _ in range(2):\n" + indent(LOOK + PREPARE, "    "), True),
    ],
)
def test_what_one_rank_does_before_prepare_is_its_own(
    code: str, of_loader: bool, is_found: bool
) -> None:
    assert (lonely_use(code, of_loader=of_loader) is not None) is is_found
