"""The gate: labkit/compat has every private name of a library, and they are there."""

import functools
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from labkit.checks import UserError
from labkit.compat.deepspeed import compile_late
from labkit.compat.gate import Gate
from labkit.compat.gate import version_of
from labkit.compat.torch import ThreadSettings
from labkit.compat.torch import global_hooks

COMPAT = Path(__file__).parents[1] / "labkit" / "compat"
MODULES = sorted(
    path.stem for path in COMPAT.glob("*.py") if path.stem not in ("__init__", "gate")
)


def gates() -> list[Gate]:
    found = []
    for name in MODULES:
        module = importlib.import_module(f"labkit.compat.{name}")
        found += [each for each in vars(module).values() if isinstance(each, Gate)]
    return list({id(gate): gate for gate in found}.values())


@pytest.mark.parametrize("gate", gates(), ids=lambda gate: gate.library)
def test_the_installed_versions_lack_nothing(gate: Gate) -> None:
    assert gate.names
    if not version_of(gate.library):
        pytest.skip(f"{gate.library} is not installed")
    assert gate.missing(load=True) == []
    gate.check()


def test_every_need_has_its_purpose() -> None:
    assert [n for gate in gates() for n, why in gate.names.items() if not why] == []


def test_what_a_version_lacks_is_said_in_one_line() -> None:
    gate = Gate("numpy")

    @gate.needs("numpy:ndarray._strides_of_old", "numpy:ndarray.shape")
    def strides() -> None:
        """Know how far apart elements are.

        There is no public way.
        """

    with pytest.raises(UserError) as caught:
        gate.check()
    assert str(caught.value).startswith("numpy 2.")
    assert "\n" not in str(caught.value)
    assert (
        " lacks numpy.ndarray._strides_of_old (Know how far apart elements are); "
        'labkit works with: pip install "numpy>=2"' in str(caught.value)
    )


def test_a_module_that_is_not_loaded_is_not_looked_at() -> None:
    gate = Gate("labkit")
    gate.needs("labkit.no_such_module:name")(print)
    gate.check()
    assert len(gate.missing(load=True)) == 1


def test_an_attribute_of_instances_is_found_in_the_methods_of_their_class() -> None:
    gate = Gate("labkit")

    @gate.needs(f"{Gate.__module__}:Gate.names", f"{Gate.__module__}:Gate.no_names")
    def read() -> None:
        """Read."""

    assert gate.missing() == ["labkit.compat.gate.Gate.no_names (Read)"]


def test_a_name_that_cannot_be_imported_is_said_in_the_same_line() -> None:
    with (
        pytest.raises(UserError, match=r"^numpy 2\S+ lacks cannot import name"),
        Gate("numpy").imports(),
    ):
        from numpy.linalg import _no_such_name  # noqa: F401
    with pytest.raises(ImportError), Gate("numpy").imports():
        importlib.import_module("json.no_such_module")


LOAD_DEEPSPEED = """
import sys
import torch
compiler = torch.compile
from labkit.strategies.zero.engines import import_deepspeed
deepspeed = import_deepspeed(torch.device("cpu"))
assert torch.compile is compiler
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
assert "torch._inductor.lowering" not in sys.modules

started = []
sys.addaudithook(
    lambda event, args: event == "subprocess.Popen" and started.append(args[0])
)
for _ in range(3):
    deepspeed.get_accelerator().device_count()
assert started == ["numactl"], started
"""


@pytest.mark.long
def test_deepspeed_loads_no_inductor_and_lists_numa_nodes_once() -> None:
    subprocess.run([sys.executable, "-c", LOAD_DEEPSPEED], check=True, timeout=100)


def test_what_is_compiled_late_is_compiled_once_when_it_is_called() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    late = functools.partial(compile_late, torch.compile)
    inner = late(lambda x: x.sin(), backend=backend)

    @late(backend=backend)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    assert graphs == []
    x = torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(outer(x), x.sin() + 1)
    assert len(graphs) == 1
    torch.testing.assert_close(inner(x), x.sin())
    assert len(graphs) == 2


def test_autograd_has_its_threads_back_after_an_interrupt() -> None:
    """In the `__exit__` of what took them, or before its `with` has begun."""
    settings = ThreadSettings()
    torch.autograd.set_multithreading_enabled(False)
    settings.restore()
    assert torch.autograd.is_multithreading_enabled()


def test_a_counter_of_flops_whose_exit_is_interrupted_leaves_no_hooks() -> None:
    """Else later models that return parameters have hooks, on this rank alone."""
    settings = ThreadSettings()
    layer = torch.nn.Linear(2, 2)
    kept = register_module_forward_hook(lambda *call: None)
    counter = FlopCounterMode(display=False)
    counter.__enter__()
    layer(torch.ones(1, 2))
    counter.mode.__exit__(None, None, None)
    assert sum(map(len, global_hooks())) == 3
    settings.restore()
    assert sum(map(len, global_hooks())) == 1
    kept.remove()
