"""Tab and Shift-Tab through a real kernel, as JupyterLab asks for them."""

import warnings
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel

from labkit.compat.ipython import completer_of

pytestmark = pytest.mark.timeout(120)

CELL = """%%dist_train ddp --name tabbed
import torch.nn.functional as F
from labkit.data import digits
seen_by_ranks = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
fit(seen_by_ranks, digits(), F.cross_entropy, batch_size=64, epochs=1,
    optimizer=torch.optim.SGD(seen_by_ranks.parameters(), lr=0.1))"""


def answer(kernel: Kernel, kind: str, code: str) -> dict[str, Any]:
    """What the kernel answers to "complete" or "inspect" with the cursor at the end."""
    request = getattr(kernel.client, kind)(code, len(code))
    while True:
        reply = kernel.client.get_shell_msg(timeout=60)
        if reply["parent_header"]["msg_id"] == request:
            content: dict[str, Any] = reply["content"]
            return content


def completed(kernel: Kernel, code: str) -> set[str]:
    """The cells that Tab would make of this one."""
    found = answer(kernel, "complete", code)
    start = found["cursor_start"]
    return {code[:start] + match for match in found["matches"]}


def test_the_line_of_a_magic_is_completed(kernel: Kernel) -> None:
    cells = completed(kernel, "%%dist_train ")
    assert {"%%dist_train fsdp", "%%dist_train zero2"} <= cells
    for code, expected in {
        "%%dist_train fsdp --acc": "%%dist_train fsdp --accumulate",
        "run = %dist_train fsdp f --name x --precision b": (
            "run = %dist_train fsdp f --name x --precision bf16"
        ),
        "%dist_runs --state fi": "%dist_runs --state finished",
    }.items():
        assert completed(kernel, code) == {expected}
    kernel.run("given_to_ranks = 1")
    code = "print()\n%dist_push given_"
    assert completed(kernel, code) == {f"{code}to_ranks"}


def test_runs_and_variables_of_ranks_are_completed(kernel: Kernel) -> None:
    assert kernel.run(CELL).status == "ok"
    for code, rest in {
        "%dist_runs other tabb": "ed",
        "%dist_pull seen_by": "_ranks",
        "%%dist\nseen_by": "_ranks",
        "%%dist 1\n\n\nprint(seen_by_ranks.zero_gr": "ad",
        "%%time\n%%dist\nfor _ in range(2):\n    seen_by_ranks.requires_gr": "ad_",
    }.items():
        assert completed(kernel, code) == {code + rest}
    assert "seen_by_ranks" not in completed(kernel, "seen_by")


def test_a_name_of_the_ranks_is_described(kernel: Kernel) -> None:
    assert kernel.run(CELL + "\n\ndef half(x):\n    'Divide by two.'").status == "ok"
    for code, words in {
        "%%dist\nhalf(": "Divide by two.",
        "%%dist\nprepare(": "batch_size: int",
        "%%dist\nseen_by_ranks.forward": "On rank 0:\n",
    }.items():
        reply = answer(kernel, "inspect", code)
        assert reply["found"]
        assert words in reply["data"]["text/plain"]
    assert not answer(kernel, "inspect", "%%dist\nthere_is_no_such_name")["found"]
    assert "On rank 0" not in answer(kernel, "inspect", "print")["data"]["text/plain"]


def test_no_rank_is_asked_for_values_alone(kernel: Kernel) -> None:
    """Under zero3 rank 0 would wait for the others to have them."""
    cell = (
        CELL.replace("ddp --name tabbed", "zero3")
        + "\nweight = seen_by_ranks[1].weight"
    )
    assert kernel.run(cell).status == "ok"
    reply = answer(kernel, "inspect", "%%dist\nweight")
    assert reply["data"]["text/plain"].startswith("On rank 0:\nType: ")
    assert completed(kernel, "%%dist\nweight.requires_gr") == {
        "%%dist\nweight.requires_grad",
        "%%dist\nweight.requires_grad_",
    }
    assert kernel.run("%%dist\ndist.barrier()").status == "ok"


FAILING = """%%dist_train zero3
import torch.nn.functional as F
from labkit.data import digits
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 512), torch.nn.Linear(512, 10)
    def forward(self, x):
        self.last(self.first(x.flatten(1)))
        raise ValueError
    def extra_repr(self):
        return f"{self.last.weight.shape}"
failing = torch.optim.SGD((net := Net()).parameters(), 0.1)
failing, optimizer, loader = prepare(net, failing, digits(), batch_size=64)
forward = failing.forward
failing(next(iter(loader))[0])"""


def test_no_parameter_is_gathered_on_one_rank(kernel: Kernel) -> None:
    """Stage 3 gathers those that are read in a forward pass, which this one is in."""
    assert "ValueError" in kernel.run(FAILING).error["evalue"]
    for name in ("failing", "failing.last.weight", "failing.forward", "forward"):
        assert answer(kernel, "inspect", f"%%dist\n{name}")["found"]
    found = answer(kernel, "inspect", "%%dist\nfailing.last.forward")
    assert "forward(input: torch.Tensor)" in found["data"]["text/plain"]
    assert kernel.run("%%dist\ndist.barrier()").status == "ok"


def test_filters_of_warnings_that_are_set_meanwhile_stay() -> None:
    class Value:
        def __dir__(self) -> list[str]:
            warnings.simplefilter("ignore", ResourceWarning)  # as the main thread may
            return ["attribute"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shell = InteractiveShell()
        shell.user_ns["value"] = Value()
        assert completer_of(shell)("value.at") == (5, [(".attribute", "attribute")])
        assert warnings.filters[0][2] is ResourceWarning


def test_the_extension_is_loaded_again(kernel: Kernel) -> None:
    reply = kernel.run("%reload_ext labkit")
    assert (reply.status, reply.stderr) == ("ok", "")
    assert completed(kernel, "%%dist_train fs") == {"%%dist_train fsdp"}
    assert "warn" not in kernel.run("pass").stderr
