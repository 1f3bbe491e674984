"""What a cell has one rank do alone, read from its text."""

import pytest

from labkit.rank.loop.rank_guards import lonely_use

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
