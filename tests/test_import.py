"""Scripts for torchrun on warm ranks: their losses, how they fail, what they leave."""

import gzip
import json
import re
import textwrap
import time
import zipfile
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kernels import Kernel
from test_train_module import BODY
from test_train_module import IMPORTS
from test_train_module import largest_difference
from test_train_module import launch
from test_train_module import script_of

from labkit import Lab
from labkit import RankError
from labkit.notebook.execution.errors import CellTimeoutError
from labkit.notebook.execution.script_file import read_script
from labkit.rank.scripts.left_running import Started
from labkit.rank.scripts.modules import OwnModules

pytestmark = pytest.mark.timeout(300)

Captured = pytest.CaptureFixture[str]
ESCAPES = re.compile(r"\x1b\[[\d;]*m")

HELPER = """
import torch


def samples(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)
"""
TRAIN = """
import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler

from helper import samples


class Samples(Dataset):
    def __init__(self):
        self.x, self.y = samples(64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build(kind):
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    if kind == "zero2":
        import deepspeed
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
        settings = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 2},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        return engine, engine
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(kind, epochs, workers):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, optimizer = build(kind)
    dataset = Samples()
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if kind == "zero2":
                model.backward(loss)
            else:
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--output", default="losses")
    args = parser.parse_args()
    assert not dist.is_initialized()
    losses = {"plain": train("plain", args.epochs, args.workers)}
    dist.init_process_group("gloo")
    for kind in args.kinds:
        losses[kind] = train(kind, args.epochs, 0)
    Path(f"{args.output}-{os.environ['RANK']}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script in a folder."""
    script = folder / name
    script.parent.mkdir(exist_ok=True, parents=True)
    script.write_text(textwrap.dedent(text))
    return script


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, in which the notebook is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def short(error: RankError) -> str:
    return ESCAPES.sub("", "\n".join(error._render_traceback_()))


def fails(lab: Lab, script: Path, *arguments: object) -> RankError:
    with pytest.raises(RankError) as caught:
        lab.import_script(script, arguments, live=False, timeout=60)
    assert lab.runs[-1].state == "failed"
    return caught.value


def losses_of(name: str) -> list[Any]:
    return [json.loads(Path(f"{name}-{rank}.json").read_text()) for rank in range(2)]


# ---- the same losses ----


@pytest.mark.long
def test_losses_are_those_under_torchrun_twice_in_a_row(lab: Lab, here: Path) -> None:
    write(here, HELPER, "helper.py")
    script = write(here, TRAIN)
    arguments = ["--kinds", "ddp", "fsdp", "zero2", "--epochs", "2"]
    done = launch(script, *arguments, "--output", "torchrun")
    assert done.returncode == 0, done.stderr
    expected = losses_of("torchrun")
    for _ in range(2):
        run = lab.import_script(script, [*arguments, "--output", "lab"], live=False)
        assert losses_of("lab") == expected
    assert run.strategy == "raw"
    assert run.code == script.read_text()
    rows = run.history.dropna(subset=["loss"])
    for rank, losses in enumerate(expected):
        noticed = rows.loc[rows["rank"] == rank, "loss"].tolist()
        assert noticed == pytest.approx(
            [loss for kind in losses.values() for loss in kind], rel=1e-5
        )


@pytest.mark.long
def test_workers_find_the_classes_of_the_script(lab: Lab, here: Path) -> None:
    write(here, HELPER, "helper.py")
    run = lab.import_script(write(here, TRAIN), ["--workers", 1], live=False)
    assert run.num_steps == 4


@pytest.mark.long
def test_an_exported_script_comes_back(lab: Lab, here: Path) -> None:
    script = write(here, script_of(BODY))
    for strategy in ("ddp", "fsdp", "zero2", "parameter_server"):
        expected = lab.train(strategy, IMPORTS + BODY, live=False)
        given = ["--strategy", strategy, "--losses", "losses.csv"]
        lab.import_script(script, given, live=False)
        assert largest_difference(here / "losses.csv", expected) == 0.0


# ---- what a script finds, and leaves ----

LOOKS = """
import __main__
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import helper

found = {
    "name": __name__,
    "main": __main__.__file__,
    "file": __file__,
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "helper": helper.VALUE,
    "rank": int(os.environ["RANK"]),
    "group": os.environ["GROUP_RANK"],
    "is_initialized": dist.is_initialized(),
    "dtype": str(torch.get_default_dtype()),
    "device": str(torch.get_default_device()),
    "has_grad": torch.is_grad_enabled(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "random": torch.rand(1).item(),
    "names": sorted({"rank", "lab_value", "prepare", "get_ipython"} & {*dir()}),
    "mine": os.environ.get("MINE"),
}
Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""
LEAVES = """
import atexit
import builtins
import faulthandler
import gc
import logging
import logging.config
import os
import signal
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import helper

helper.VALUE = "changed"
lab_value = rank = "overwritten"
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_num_threads(7)
torch.set_float32_matmul_precision("high")
torch.set_printoptions(precision=1)
np.seterr(all="raise")
np.set_printoptions(precision=1)
os.umask(0)
logging.config.dictConfig({"version": 1})
logging.captureWarnings(True)
torch.backends.cuda.matmul.allow_tf32 = True
torch.nn.modules.module.register_module_forward_hook(lambda *args: 1 / 0)
torch._dynamo.config.suppress_errors = True
os.environ["MINE"] = "left"
os.environ["WORLD_SIZE"] = "17"
os.chdir("/")
sys.argv = ["other"]
sys.path.insert(0, "/nowhere")
sys.excepthook = None
builtins.left_here = 1
gc.disable()
gc.callbacks.append(lambda *args: None)
tracemalloc.start()
sys.setprofile(lambda *args: None)
os.sched_setaffinity(0, {0})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
faulthandler.dump_traceback_later(30, exit=True, file=2)
os.environ["TZ"] = "Asia/Tokyo"
time.tzset()
for stream in (1, 2):
    os.dup2(os.open("/dev/null", os.O_WRONLY), stream)
torch.set_autocast_enabled("cpu", True)
torch.__future__.set_swap_module_params_on_conversion(True)
logging.basicConfig(level=logging.DEBUG)
logging.setLoggerClass(type("Own", (logging.Logger,), {}))
logging.getLogger("mine").addHandler(logging.StreamHandler())
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
    signal.signal(each, lambda *args: 1 / 0)
signal.alarm(100)
warnings.simplefilter("error")
torch.multiprocessing.set_start_method("spawn")
Path(os.environ["KEPT"] + os.environ["RANK"]).touch()
atexit.register(Path(os.environ["KEPT"] + os.environ["RANK"]).unlink)
dist.init_process_group("nccl")
dist.new_group([0])
"""
WHOLE = """
import builtins, gc, logging, multiprocessing, os, signal, sys, time, tracemalloc
import warnings
import numpy, helper
mask = os.umask(0)
os.umask(mask)
whole = [
    lab_value, helper.VALUE, helper is kept_helper,
    torch.get_default_dtype(), torch.ones(1).device.type, torch.is_grad_enabled(),
    torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
    torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision,
    torch._dynamo.config.suppress_errors,
    "MINE" in os.environ, os.environ["WORLD_SIZE"], os.environ.get("GROUP_RANK"),
    os.getcwd(), sys.argv, sys.path, sys.excepthook,
    hasattr(builtins, 'left_here'), gc.isenabled(),
    logging.root.handlers, logging.getLogger("mine").handlers, logging.root.level,
    mask, numpy.geterr()["over"], numpy.get_printoptions()["precision"],
    str(torch.tensor(1 / 3)), logging.getLogger("torch").disabled, warnings.showwarning,
    [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGALRM)],
    signal.getitimer(signal.ITIMER_REAL)[0], sys.modules["__main__"].__name__,
    multiprocessing.get_start_method(allow_none=True), callable(get_ipython),
    len(gc.callbacks), tracemalloc.is_tracing(), sys.getprofile(), time.tzname,
    os.sched_getaffinity(0), signal.pthread_sigmask(signal.SIG_BLOCK, []),
    os.readlink("/proc/self/fd/1"), os.readlink("/proc/self/fd/2"),
    torch.is_autocast_enabled("cpu"), logging.getLoggerClass(),
    torch.__future__.get_swap_module_params_on_conversion(),
]
whole = [each if isinstance(each, (int, str)) else repr(each) for each in whole]
torch.nn.Linear(1, 1)(torch.ones(1))
total = torch.ones(1)
dist.all_reduce(total)
"""
TRAINS_ON = """
optimizer.zero_grad()
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
loss = model(torch.ones(4, 8)).sum().item()
"""


def test_a_script_finds_a_process_of_its_own(lab: Lab, here: Path) -> None:
    write(here, "VALUE = 'elsewhere'", "helper.py")
    lab.run("import helper\nlab_value = 1\ntorch.set_default_dtype(torch.float64)")
    write(here, "VALUE = 'beside'", "scripts/helper.py")
    script = write(here, LOOKS, "scripts/look.py")
    for _ in range(2):
        lab.import_script("scripts/look.py", ["--rate", 0.1, "a b"], live=False)
        ranks = [
            json.loads((here / f"found-{rank}.json").read_text()) for rank in range(2)
        ]
        assert ranks[0]["random"] != ranks[1]["random"]
        for rank, found in enumerate(ranks):
            del found["random"]
            assert found == {
                "name": "__main__",
                "main": str(script),
                "file": str(script),
                "argv": ["scripts/look.py", "--rate", "0.1", "a b"],
                "path": str(script.parent),
                "cwd": str(here),
                "helper": "beside",
                "rank": rank,
                "group": "0",
                "is_initialized": False,
                "dtype": "torch.float32",
                "device": "cpu",
                "has_grad": True,
                "deterministic": False,
                "names": [],
                "mine": None,
            }
    lab.run("import helper\nwhole = helper.VALUE, torch.get_default_dtype()")
    assert lab.pull("whole", "all") == [("elsewhere", lab.pull("torch").float64)] * 2
    lab.run(
        "torch.set_default_dtype(torch.float32)\nimport sys\ndel sys.modules['helper']"
    )


@pytest.mark.parametrize("ends", ["", "raise ValueError('on purpose')"])
def test_the_lab_is_whole_after_a_script(lab: Lab, here: Path, ends: str) -> None:
    write(here, "VALUE = 'as it was'", "helper.py")
    kept = f"import os\nos.environ['KEPT'] = {str(here / 'kept')!r}\n"
    lab.run(kept + "import helper\nkept_helper = helper\nlab_value = 1")
    lab.run(WHOLE)
    before = lab.pull("whole", "all")
    lab.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(0)\n"
        "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))\n"
        "model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + TRAINS_ON
    )
    script = write(here, LEAVES + ends)
    if ends:
        assert "ValueError: on purpose" in str(fails(lab, script))
    else:
        lab.import_script(script, live=False)
    assert not list(here.glob("kept?")), "what it registered with atexit has run"
    lab.run(WHOLE)
    assert lab.pull("whole", "all") == before
    lab.run(TRAINS_ON, timeout=30)
    one, other = lab.pull("loss", "all")
    assert one == other
    lab.run("del os.environ['KEPT'], sys.modules['helper'], model, optimizer, mesh")


LEAVES_A_HANDLER = """
import os
import signal
import sys
import time
import torch
import helper

class Slow:
    @property
    def __file__(self):
        time.sleep(2)

if os.environ["RANK"] == "1":
    sys.modules["slow"] = Slow()
torch.set_default_dtype(torch.float64)
signal.signal(signal.SIGINT, lambda *args: [].pop())
1 / 0
"""


def test_what_a_script_has_changed_is_put_back_before_an_interrupt(
    lab: Lab, here: Path
) -> None:
    """Rank 0 has failed; rank 1 has too, and is slow to put things back. What the
    script does with an interrupt is over by then."""
    write(here, "", "helper.py")
    lab.run(
        "import sys, time, helper\nkept_helper = helper\n"
        "from labkit.rank.scripts.torch_settings import TorchSettings\n"
        "kept = TorchSettings.restore\n"
        "def restore(self):\n"
        "    if rank == 1 and torch.get_default_dtype() == torch.float64:\n"
        "        time.sleep(2)\n"
        "    kept(self)\n"
        "TorchSettings.restore = restore"
    )
    script = write(here, LEAVES_A_HANDLER)
    assert "ZeroDivisionError" in str(fails(lab, script))
    lab.run(
        "import helper\nTorchSettings.restore = kept\n"
        "found = str(torch.get_default_dtype()), helper is kept_helper\n"
        "del sys.modules['helper']\nsys.modules.pop('slow', None)"
    )
    assert lab.pull("found", "all") == [("torch.float32", True)] * 2


def test_a_helper_that_was_edited_is_read_again(
    lab: Lab, here: Path, capsys: Captured
) -> None:
    script = write(here, "import helper\nprint(helper.VALUE)")
    for value in ("one", "three"):
        write(here, f"VALUE = '{value}'", "helper.py")
        lab.import_script(script, live=False)
        assert capsys.readouterr().out == f"[ranks 0-1] {value}\n"


LOOKS_ELSEWHERE = """
import os
import sys
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../lib"))
import parts
print(parts.VALUE)
"""


def test_scripts_that_look_elsewhere_find_what_is_there_each(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    for each in ("one", "two"):
        write(tmp_path, f"VALUE = '{each}'", f"{each}/lib/parts.py")
        script = write(tmp_path, LOOKS_ELSEWHERE, f"{each}/src/train.py")
        lab.import_script(script, live=False)
        assert capsys.readouterr().out == f"[ranks 0-1] {each}\n"


LOGS = """
import logging
import helper
log = logging.getLogger(__name__)
log.addHandler(logging.StreamHandler())
log.warning("said")
helper.log.addHandler(logging.StreamHandler())
helper.log.warning("helped")
"""


OF_ANOTHER_FOLDER = "import sys\nsys.modules['helper'] = type(sys)('helper')"


@pytest.mark.parametrize("before", ["import helper", OF_ANOTHER_FOLDER])
def test_a_second_run_says_things_once(
    lab: Lab, here: Path, capsys: Captured, before: str
) -> None:
    write(here, "import logging\nlog = logging.getLogger(__name__)", "helper.py")
    lab.run(before)  # the notebook's, which stays
    script = write(here, LOGS)
    for _ in range(2):
        lab.import_script(script, live=False)
        assert capsys.readouterr().err == "[ranks 0-1] said\n            helped\n"
    lab.run("import sys; del sys.modules['helper']")


def test_a_script_sets_up_logging_where_a_cell_has(
    lab: Lab, here: Path, capsys: Captured
) -> None:
    lab.run("import logging\nlogging.basicConfig(format='cell: %(message)s')")
    text = "import logging\nlogging.basicConfig(format='script: %(message)s')\n"
    lab.import_script(write(here, text + "logging.warning('here')"), live=False)
    lab.run("logging.warning('here'); logging.root.handlers.clear()")
    said = "[ranks 0-1] script: here\n[ranks 0-1] cell: here\n"
    assert capsys.readouterr().err == said


LOGS_OF_DEEPSPEED = """
from deepspeed.utils import logger
print(len(logger.handlers), logger.propagate)
"""


@pytest.mark.long
def test_a_library_keeps_its_loggers(lab: Lab, here: Path, capsys: Captured) -> None:
    script = write(here, LOGS_OF_DEEPSPEED)
    for _ in range(2):
        lab.import_script(script, live=False)
        assert "[ranks 0-1] 1 False\n" in capsys.readouterr().out


STARTS = """
import multiprocessing
import os
import threading
import time
from pathlib import Path


def work(name, seconds):
    time.sleep(seconds)
    Path(f"{name}-{os.environ['RANK']}").touch()


threading.Thread(target=work, args=("thread", 0.5)).start()
context = multiprocessing.get_context("fork")
context.Process(target=work, args=("process", 0.5)).start()
context.Process(target=work, args=("daemon", 1000), daemon=True).start()
"""


@pytest.mark.parametrize("ends", ["", "1 / 0"])
def test_what_a_script_starts_ends_with_it(lab: Lab, here: Path, ends: str) -> None:
    script = write(here, STARTS + ends)
    if ends:
        fails(lab, script)
    else:
        lab.import_script(script, live=False, timeout=60)
        found = {each.name for each in here.iterdir() if each.suffix != ".py"}
        names = {f"{what}-{rank}" for what in ("thread", "process") for rank in (0, 1)}
        assert names <= found
    lab.run("import multiprocessing; left = len(multiprocessing.active_children())")
    assert lab.pull("left", "all") == [0, 0]


KEEPS_FILES = """
import gzip
import os
import sys
import threading
import time
import zipfile

import torch

rank, stop = os.environ["RANK"], os.path.abspath("stop")
text = open(f"text-{rank}", "w")
text.write("written")
packed = gzip.open(f"packed-{rank}.gz", "wt")
packed.write("written")
archive = zipfile.ZipFile(f"archive-{rank}.zip", "w")
archive.writestr("name", "written")
model = torch.nn.Linear(8, 8)
model.is_of_the_script = True


def work(name):
    time.sleep(0.5)
    with open(name, "w") as file:
        file.write("written")


def watch():
    while not os.path.exists(stop):
        time.sleep(0.1)
        text.fileno()


"""
COMPILES = """
@torch.compile(backend="eager")
def double(x):
    return 2 * x

double(torch.ones(1))
"""
WATCHES = "threading.Thread(target=watch, name='watch', daemon=True).start()"


def whole_files(folder: Path, rank: int) -> list[str]:
    """What the script has written: as an editor, gzip and zip read it."""
    with gzip.open(folder / f"packed-{rank}.gz", "rt") as packed:
        parts = [(folder / f"text-{rank}").read_text(), packed.read()]
    with zipfile.ZipFile(folder / f"archive-{rank}.zip") as archive:
        return [*parts, archive.read("name").decode()]


def test_what_a_script_leaves_open_is_written_and_freed(lab: Lab, here: Path) -> None:
    """A function that is compiled stays, and with it the names of the script."""
    script = write(here, KEEPS_FILES + COMPILES)
    for _ in range(2):
        lab.import_script(script, live=False)
        for rank in range(2):
            assert whole_files(here, rank) == ["written"] * 3
            (here / f"text-{rank}").unlink()
    lab.run(
        "import gc\n"
        "left = sum('is_of_the_script' in vars(each) for each in gc.get_objects()\n"
        "           if type(each) is torch.nn.Linear)"
    )
    assert lab.pull("left", "all") == [0, 0]


def test_a_thread_of_a_script_that_goes_on_has_its_names(
    lab: Lab, here: Path, capsys: Captured
) -> None:
    lab.import_script(write(here, KEEPS_FILES + WATCHES), live=False)
    assert [(here / f"text-{rank}").read_text() for rank in range(2)] == ["written"] * 2
    (here / "stop").touch()
    lab.run(
        "import threading\n"
        "for each in threading.enumerate():\n"
        "    if each.name == 'watch':\n"
        "        each.join()"
    )
    assert "Traceback" not in capsys.readouterr().err


HAS_AN_ENGINE = """
import sys

import deepspeed
import torch
from deepspeed.ops.op_builder.all_ops import ALL_OPS

deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(sys.argv[1])},
    },
)
engine.backward(engine(torch.ones(4, 8)).mean())
engine.step()
"""
COUNT_ENGINES = """
import gc
gc.collect()
engines = sum(type(each).__name__ == "DeepSpeedEngine" for each in gc.get_objects())
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_engines_of_deepspeed_are_freed_but_for_those_of_the_lab(
    lab: Lab, here: Path, stage: int
) -> None:
    lab.run(HAS_AN_ENGINE.replace("sys.argv[1]", str(stage)))
    lab.run(COUNT_ENGINES)
    before = lab.pull("engines", "all")
    lab.run("gc.freeze()")  # as a training loop may: the collector lists them no more
    script = write(here, HAS_AN_ENGINE + "import gc\ngc.unfreeze()")
    for _ in range(2):
        lab.import_script(script, [stage], live=False)
    lab.run(COUNT_ENGINES)
    assert lab.pull("engines", "all") == before
    lab.run(
        "engine.backward(engine(torch.full((4, 8), rank + 1.0)).mean())\n"
        "engine.step()\n"
        "output = engine(torch.ones(4, 8)).mean().item()"
    )
    one, other = lab.pull("output", "all")
    assert one == other, "they still average gradients"
    lab.run("engine.destroy()\ndel engine, model")


SAVES_LAST = """
import concurrent.futures
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def work():
    time.sleep(0.5)
    Path(f"late-{os.environ['RANK']}").touch()


dist.init_process_group("gloo")
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(work)
state = {f"w{i}": torch.full((512, 512), float(i)) for i in range(16)}
dcp.async_save(state, checkpoint_id="saved")
"""


def test_what_pools_have_to_do_is_done_before_a_script_ends(
    lab: Lab, here: Path
) -> None:
    """Python waits for that, too: a last checkpoint would be cut off otherwise."""
    lab.import_script(write(here, SAVES_LAST), live=False)
    assert {f"late-{rank}" for rank in range(2)} <= {
        each.name for each in here.iterdir()
    }
    state = {f"w{i}": torch.zeros(512, 512) for i in range(16)}
    dcp.load(state, checkpoint_id=here / "saved", no_dist=True)
    assert [each.mean().item() for each in state.values()] == [*map(float, range(16))]


SETS_ONCE = """
import torch

torch.set_num_interop_threads(1)
library = torch.library.Library("of_a_script", "DEF")
library.define("double(Tensor x) -> Tensor")


@torch.library.impl(library, "double", "CompositeImplicitAutograd")
def double(x):
    return 2 * x


print(torch.ops.of_a_script.double(torch.ones(1)).item())
"""


def test_what_a_process_may_set_once_a_script_sets_in_each_run(
    lab: Lab, here: Path, capsys: Captured
) -> None:
    script = write(here, SETS_ONCE)
    for _ in range(2):
        lab.import_script(script, live=False)
        assert capsys.readouterr().out == "[ranks 0-1] 2.0\n"


@pytest.mark.parametrize(("ends", "code"), [("", 0), ("exit(3)", 3), ("1 / 0", 1)])
@pytest.mark.long
def test_a_process_that_the_script_forked_ends_with_it(
    lab: Lab, here: Path, capfd: pytest.CaptureFixture[str], ends: str, code: int
) -> None:
    text = f"""
    import os
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        {ends or "pass"}
    """
    lab.import_script(write(here, text), live=False, timeout=30)
    assert f"[ranks 0-1] {code}\n" in capfd.readouterr().out


# ---- how it ends ----

FAILS = """
import os
import torch.distributed as dist


def step():
    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step()
"""


def test_a_failure_names_the_rank_and_the_line_of_the_file(
    lab: Lab, here: Path
) -> None:
    script = write(here, FAILS)
    error = fails(lab, script)
    assert error.rank == 1
    assert "rank 1: failed at train.py, line 8: raise ValueError(" in str(error)
    text = short(error)
    assert "train.py:8" in text
    assert "in step()" in text
    assert "labkit/rank" not in text
    assert "__labkit" not in text
    assert error.outcomes[0].status == "interrupted"
    assert "train.py, line 9" in error.outcomes[0].where


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("import sys; sys.exit(3)", "it ended with exit code 3"),
        ("exit('no data')", "train.py ended with the message: no data"),
        ("import os; os._exit(4)", "it ended with exit code 4"),
        (
            "import argparse; argparse.ArgumentParser().parse_args()",
            "was given the arguments --lr 1, which it does not take",
        ),
    ],
)
def test_an_exit_with_a_code_is_a_failure(
    lab: Lab, here: Path, ends: str, words: str
) -> None:
    error = fails(lab, write(here, ends), "--lr", 1)
    assert words in str(error)
    assert "at train.py, line 1" in str(error)


@pytest.mark.parametrize("ends", ["import sys; sys.exit()", "import os; os._exit(0)"])
def test_an_exit_without_one_is_an_end(lab: Lab, here: Path, ends: str) -> None:
    assert lab.import_script(write(here, ends), live=False).state == "finished"


def test_a_script_that_does_not_end_is_stopped(lab: Lab, here: Path) -> None:
    script = write(here, "x = 0\nwhile True:\n    x += 1\n")
    with pytest.raises(CellTimeoutError, match=r"rank 1: stopped at train.py, line"):
        lab.import_script(script, live=False, timeout=1)
    lab.check()


# ---- what is refused, and the magic's line ----


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no.py", None, "there is no file"),
        ("folder", "", "is a folder"),
        ("torchrun", None, "leave it out, with its options"),
        ("train.ipynb", "{}", "is a notebook"),
        ("train.py", "def f(:", "train.py, line 1: invalid syntax: def f"),
        ("train.py", "%matplotlib inline", "line 1: invalid syntax"),
        ("train.py", "x = '\0'", "null bytes"),
    ],
)
def test_what_is_no_script_is_refused(
    here: Path, name: str, text: str | None, words: str
) -> None:
    if name == "folder":
        (here / name).mkdir()
    elif text is not None:
        write(here, text, name)
    with pytest.raises(ValueError, match=words):
        read_script(name, [], module=False)


def test_arguments_are_text_or_numbers(here: Path) -> None:
    write(here, "")
    for wrong in ("--lr 1", [None], ["\0"]):
        with pytest.raises(ValueError, match=r"argument"):
            read_script("train.py", wrong, module=False)  # type: ignore[arg-type]


def test_a_link_leads_to_the_folder_of_the_script(here: Path) -> None:
    file = write(here, "", "package/train.py")
    (here / "link.py").symlink_to(file)
    found = read_script("link.py", [], module=False)
    assert found.import_folder == str(file.parent)
    assert found.arguments == ["link.py"]


def test_a_module_is_found_without_being_imported(here: Path) -> None:
    write(here, "raise ValueError", "package/__init__.py")
    file = write(here, "", "package/train.py")
    found = read_script("package.train", ["--x"], module=True)
    assert found.arguments == [str(file), "--x"]
    assert found.import_folder == str(here)
    assert found.command == "-m package.train --x"
    file = write(here, "", "projects/chars/train.py")
    assert read_script("projects.chars.train", [], module=True).file == str(file)
    with pytest.raises(ValueError, match=r"no module 'package\.other'"):
        read_script("package.other", [], module=True)


SAYS = """
import argparse
from .helper import VALUE
parser = argparse.ArgumentParser()
parser.add_argument("--name")
print(VALUE, parser.parse_args().name)
"""


@pytest.mark.long
def test_the_magic_keeps_its_own_options(kernel: Kernel, tmp_path: Path) -> None:
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "VALUE = 5", "package/helper.py")
    write(tmp_path, SAYS, "package/train.py")
    write(tmp_path, "print(__spec__.name, __package__)", "package/__main__.py")
    kernel.run(f"%cd -q {tmp_path}")
    line = "%dist_import --no-live --name mine -m package.train --name 'a b'"
    done = kernel.run(line + "\n__import__('labkit').current_lab().runs[-1].name")
    assert done.status == "ok", done.stderr
    assert "[ranks 0-1] 5 a b" in done.stdout
    said = kernel.run("%dist_import --no-live -m package").stdout
    assert "[ranks 0-1] package.__main__ package\n" in said
    said = kernel.run("%dist_import --no-live -m package.train --help").stdout
    assert "usage:" in said
    assert "--name NAME" in said
    assert "SCRIPT" in kernel.run("%dist_import --help").stdout
    found = kernel.run("%dist_import --nproc-per-node 2 train.py").stderr
    assert "unrecognized arguments: --nproc-per-node" in found
    found = kernel.run(f"%dist_export {tmp_path / 'again.py'}").stderr
    assert "launch that by itself" in found
    assert not (tmp_path / "again.py").exists()


def test_what_a_pool_has_to_do_may_submit_more() -> None:
    started = Started(OwnModules([Path("nowhere")], frozenset()))
    futures: list[Future[Any]] = []

    def submit_more() -> bool:
        """As a thread of the pool may while that is asked."""
        futures.append(pool.submit(time.sleep, 0.1))
        return False

    with ThreadPoolExecutor(1) as pool, started.noting():
        futures.append(pool.submit(time.sleep, 0.1))
        setattr(futures[0], "done", submit_more)  # noqa: B010
        futures[0].add_done_callback(lambda _: submit_more())
        started.wait_for_threads()
        assert len(futures) > 1
        assert all(each.done() for each in futures[1:])


def test_a_weak_reference_that_a_script_leaves_is_no_error(
    lab: Lab, here: Path
) -> None:
    script = "import weakref\nclass Model: pass\ngone = weakref.proxy(Model())\n"
    lab.import_script(write(here, script), live=False)


def test_an_engine_that_was_not_made_hides_no_error(lab: Lab, here: Path) -> None:
    script = HAS_AN_ENGINE.replace(
        '"zero_optimization"', '"optimizer": {"type": "Unknown"}, "zero_optimization"'
    ).replace("optimizer=torch.optim.AdamW(model.parameters()),", "")
    assert script.count("Unknown") == 1
    with pytest.raises(RankError, match="Unknown is not a supported DeepSpeed"):
        lab.import_script(write(here, script), [1], live=False)
