"""What GPUs will be asked to do, as far as that shows without one.

Gloo stands in NCCL's place where the order of calls matters; what is read from torch is
written out as torch gives it.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_cell_end import SHARDED

from labkit import Lab
from labkit import RankError
from labkit.checks import UnsupportedLoopError
from labkit.compat import c10d
from labkit.notebook.cluster.rank_group import are_alike
from labkit.rank.data.devices import to_device
from labkit.rank.group.aborts import Aborts
from labkit.rank.group.aborts import in_order
from labkit.rank.group.connections import close_listeners
from labkit.rank.group.connections import listening_ports
from labkit.rank.group.settings import NCCL
from labkit.rank.group.settings import set_variables
from labkit.rank.measuring import devices
from labkit.rank.measuring import memory
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.telemetry.exceptions import chain
from labkit.rank.telemetry.stack_trace import oldest_under_way
from labkit.records import Batch
from labkit.strategies.mesh.channel import Channel
from labkit.strategies.model.shards import norm_of_parts
from labkit.strategies.model.states import move_states
from labkit.strategies.options import replace_batchnorm
from labkit.strategies.prepared import read_if_here
from labkit.strategies.relay.elsewhere import elsewhere
from labkit.strategies.zero.config import bucket_elements
from labkit.strategies.zero.config import check_ratio
from labkit.strategies.zero.config import deepspeed_config
from labkit.strategies.zero.engines import numbered_as
from labkit.train_options import TrainOptions

pytestmark = pytest.mark.timeout(120)


# ---- which collective a rank is in ----


def test_the_records_of_all_backends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class BuiltForGpus:
        @staticmethod
        def _dump_fr_trace_json(*flags: bool) -> bytes:
            return f"gloo {flags}".encode()

        @staticmethod
        def _dump_nccl_trace_json(*flags: bool) -> bytes:
            return f"nccl {flags}".encode()

    is_built_for_gpus = hasattr(c10d._c10d, "_dump_nccl_trace_json")
    assert len(c10d.flight_records(True, False)) == 1 + is_built_for_gpus
    monkeypatch.setattr(c10d, "_c10d", BuiltForGpus)
    assert c10d.flight_records(True, False) == [
        "gloo (True, False)",
        "nccl (True, False)",
    ]


def entry(name: str, created: int, **changed: Any) -> dict[str, Any]:
    """One of the Flight Recorder."""
    return {
        "profiling_name": name,
        "time_created_ns": created,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 7,
        "p2p_seq_id": 3,
        "is_p2p": False,
        "state": "scheduled",
        "retired": False,
        **changed,
    }


def name_under_way(*records: list[dict[str, Any]], since: int = 0) -> str | None:
    found = oldest_under_way([{"entries": each} for each in records], since)
    return found and found["profiling_name"]


def test_the_oldest_collective_of_any_backend_is_found() -> None:
    gloo = [entry("gloo:all_reduce", 5), entry("gloo:broadcast", 9)]
    nccl = [
        entry("nccl:all_reduce", 1, state="completed"),
        entry("nccl:all_reduce", 2, retired=True),
        entry("nccl:broadcast", 3),
    ]
    assert name_under_way(gloo, nccl) == "nccl:broadcast"
    assert name_under_way(gloo, nccl, since=4) == "gloo:all_reduce"
    assert name_under_way([]) is None
    assert oldest_under_way([{"version": "2.10"}], 0) is None


def test_the_parts_of_a_batch_that_has_ended_are_not_under_way() -> None:
    parts = [entry(f"nccl:{n}", 1, is_p2p=True) for n in ("send 0->1", "recv 0<-1")]
    whole = entry("nccl:coalesced", 2, is_p2p=True)
    assert name_under_way([*parts, whole]) == "nccl:send 0->1"
    for ended in ({"state": "completed"}, {"retired": True}):
        assert name_under_way([*parts, {**whole, **ended}]) is None
        other = entry("nccl:send 1->0", 3, is_p2p=True, p2p_seq_id=4)
        assert name_under_way([*parts, {**whole, **ended}, other]) == "nccl:send 1->0"


# ---- settings of torch's backends ----


def test_what_would_end_engines_is_overridden_and_said() -> None:
    mine = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_SOCKET_IFNAME": "eth7"}
    [note] = set_variables("nccl", mine)
    assert note.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is set here, and ranks")
    assert NCCL.items() <= mine.items()
    assert mine["NCCL_SOCKET_IFNAME"] == "eth7"
    assert set_variables("nccl", mine) == []


def test_nothing_is_said_of_nccl_where_it_is_not_used() -> None:
    assert set_variables("gloo", {"TORCH_NCCL_ENABLE_MONITORING": "1"}) == []


# ---- aborts ----


class Communicator:
    """An abort of one that waits for the device, until it is let go."""

    def __init__(self, *, is_stuck: bool = False) -> None:
        self.num_aborts = 0
        self.go = threading.Event()
        if not is_stuck:
            self.go.set()

    def abort(self) -> None:
        self.num_aborts += 1
        self.go.wait()


def test_one_abort_does_not_wait_for_another() -> None:
    stuck, idle = Communicator(is_stuck=True), Communicator()
    aborts = Aborts()
    aborts.start({stuck: "0", idle: "1"})
    assert not aborts.wait(0.01)
    assert (stuck.num_aborts, idle.num_aborts) == (1, 1)
    aborts.start({stuck: "0", idle: "1"})  # what is under way is not begun again
    assert stuck.num_aborts == 1
    stuck.go.set()
    assert aborts.wait(30)
    assert idle.num_aborts == 2


def test_the_default_group_is_aborted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    default, first, second = Communicator(), Communicator(), Communicator()
    monkeypatch.setattr(type(dist.group), "_WORLD", default, raising=False)
    monkeypatch.setattr(
        "labkit.rank.group.aborts.dist.group", type("G", (), {"WORLD": default})
    )
    groups = {second: "2", first: "1", default: "9"}
    assert in_order(groups) == [default, first, second]


def test_what_waits_for_connections_is_freed() -> None:
    def wait() -> None:
        try:
            listener.accept()
        except OSError as error:
            raised.append(error)

    raised: list[OSError] = []
    with socket.create_server(("127.0.0.1", 0)) as kept:
        before = set(listening_ports())
        assert kept.getsockname()[1] in before
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=wait)
            thread.start()
            while not raised:
                close_listeners(before)
                thread.join(0.01)
        with socket.create_connection(kept.getsockname()):
            pass


IN_NCCLS_PLACE = """
from labkit.rank.engine.rpc import runner
kind = type(runner().group)
own = kind.can_abort
kind.can_abort = property(lambda self: True)
"""


@pytest.fixture
def aborting(lab: Lab) -> Iterator[Lab]:
    """A lab whose groups are left as NCCL's are."""
    lab.run(IN_NCCLS_PLACE)
    yield lab
    lab.run("kind.can_abort = own")


@pytest.mark.parametrize("strategy", ["hsdp", "zero1"])
def test_what_was_bound_to_aborted_groups_is_bound_again(
    aborting: Lab, strategy: str
) -> None:
    lab = aborting
    lab.train(strategy, SHARDED, live=False)
    lab.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "pair, names = dist.new_group([0, 1]), ('a', 'b')\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=names)"
    )
    with pytest.raises(RankError, match="ValueError"):
        lab.run("if rank == 0:\n    raise ValueError\ndist.barrier(group=pair)")
    lab.run(
        "found = [torch.ones(1) for _ in range(3)]\n"
        "for each, group in zip(found, (None, pair, mesh.get_group('b'))):\n"
        "    dist.all_reduce(each, group=group)\n"
        "found = [each.item() for each in found]\n"
        "model(torch.ones(2, 4))"
    )
    assert lab.pull("found", "all") == [[2.0] * 3] * 2
    lab.train(strategy, SHARDED, live=False)


def test_the_timeout_of_a_group_ends_what_the_backend_does_not(aborting: Lab) -> None:
    lab = aborting
    lab.run(
        "from datetime import timedelta\n"
        "kept, timeout = rank, kind.timeout\n"
        "kind.timeout = property(lambda self: timedelta(seconds=1))"
    )
    expected = (
        r"rank 0: all_?reduce #\d+ has waited for longer than the timeout of the "
        "process group, 1 s"
    )
    with pytest.raises(RuntimeError, match=expected):
        lab.run(
            "import time\n"
            "if rank == 0:\n    dist.all_reduce(torch.ones(1))\n"
            "else:\n    time.sleep(10_000)",
            hang_after=2,
        )
    lab.run("kind.timeout = timeout\ntotal = torch.ones(1)\ndist.all_reduce(total)")
    assert [each.item() for each in lab.pull("total", "all")] == [2.0, 2.0]
    assert lab.pull("kept", "all") == [0, 1]


# ---- whether a group works ----


def test_the_counts_of_all_groups_are_compared() -> None:
    assert are_alike([{"0": 3, "1": 2}, {"0": 3, "1": 2}])
    assert are_alike([{"0": 3, "1": 2}, {"0": 3, "2": 5}])  # each has one of its own
    assert not are_alike([{"0": 3, "1": 2}, {"0": 3, "1": 1}])
    assert are_alike([{}, {}])


def test_half_a_collective_of_a_sub_group_breaks_the_group(lab: Lab) -> None:
    lab.run("pair = dist.new_group([0, 1])\nbefore = str(dist.group.WORLD)")
    with pytest.raises(RankError):
        lab.run(
            "if rank == 0:\n    dist.all_reduce(torch.ones(1), group=pair, "
            "async_op=True)\nraise ValueError"
        )
    lab.run("total = torch.ones(1)\ndist.all_reduce(total, group=pair)")
    assert [each.item() for each in lab.pull("total", "all")] == [2.0, 2.0]


# ---- rank 0 alone ----


@pytest.mark.long
def test_a_group_of_one_is_made_where_it_is_needed(lab: Lab) -> None:
    count = "num = len(dist.distributed_c10d._world.pg_map)"
    lab.restart(everyone=True)
    lab.run(count)
    assert lab.pull("num", "all") == [1, 1]
    for _ in range(2):
        run = lab.train("single", "total = torch.ones(1)\ndist.all_reduce(total)")
        assert run.state == "finished"
    assert lab.pull("total", 0).item() == 1.0
    lab.run(count + "\ntotal = torch.ones(1)\ndist.all_reduce(total)")
    assert lab.pull("num", "all") == [2, 1]
    assert torch.stack(lab.pull("total", "all")).tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("strategy", ["zero1", "hsdp"])
def test_five_runs_make_no_more_groups_than_one(lab: Lab, strategy: str) -> None:
    counts = []
    for _ in range(5):
        lab.train(strategy, SHARDED, live=False)
        lab.run("num = len(dist.distributed_c10d._world.pg_map)")
        counts.append(lab.pull("num", "all"))
    assert counts == [counts[0]] * 5


# ---- a device that is lost to a process ----

ASSERT = "CUDA error: device-side assert triggered"
GPU = torch.device("cuda", 0)


class Stream:
    """The current stream of a process in which a kernel has failed, or has not."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def query(self) -> bool:
        if self.error:
            raise torch.AcceleratorError(self.error)
        return False  # it is busy, for which nobody waits


def test_a_device_is_lost_once_every_call_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices.why_lost(torch.device("cpu")) == ""
    assert devices.why_lost(GPU) == ""  # never used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert devices.why_lost(GPU) == ""
    more = f"{ASSERT}\nCUDA kernel errors might be asynchronously reported"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(more))
    assert devices.why_lost(GPU) == ASSERT


@pytest.mark.parametrize("line", ["pass", "if rank == 1: raise ValueError"])
def test_a_rank_that_has_lost_its_device_is_restarted(
    lab: Lab, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("kept = rank")
    with pytest.raises(RankError) as error:
        lab.run(
            "from labkit.rank.engine import cell_runner\n"
            f"if rank == 1: cell_runner.why_lost = lambda device: {ASSERT!r}\n{line}"
        )
    assert error.value.rank == 1
    expected = f"AcceleratorError: {ASSERT}" if line == "pass" else "ValueError"
    assert expected in str(error.value)
    assert f"rank 1 has to be restarted: {ASSERT}." in capsys.readouterr()[1]
    lab.run("total = torch.ones(1)\ndist.all_reduce(total)")
    assert [each.item() for each in lab.pull("total", "all")] == [2.0, 2.0]
    assert lab.pull("kept", 0) == 0
    with pytest.raises(NameError, match="kept"):
        lab.pull("kept", 1)


def test_a_device_that_was_lost_after_a_cell_is_found_before_a_group_forms(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run(
        "kept = rank\nfrom labkit.rank.engine import rpc\n"
        f"if rank == 1: rpc.why_lost = lambda device: {ASSERT!r}"
    )
    with pytest.raises(RankError, match="ValueError"):
        lab.run("if rank == 0: raise ValueError\ndist.barrier()")
    assert f"rank 1 has to be restarted: {ASSERT}." in capsys.readouterr()[1]
    lab.run("total = torch.ones(1)\ndist.all_reduce(total)")
    assert [each.item() for each in lab.pull("total", "all")] == [2.0, 2.0]
    assert lab.pull("kept", 0) == 0


# ---- values that are on their way ----


class OnGpu(torch.Tensor):
    """A scalar that a stream has yet to compute."""

    is_cuda = True  # type: ignore[assignment]


class LateEvent:
    """The end of what a stream computes: the value is there once it is waited for."""

    pending: torch.Tensor | None = None
    is_lost = False

    def __init__(self, **settings: bool) -> None:
        assert settings == {"blocking": True}  # or the waiting thread would spin

    def record(self, stream: Any) -> None:
        assert stream == "the loop's own"

    def synchronize(self) -> None:
        if self.is_lost:
            raise torch.AcceleratorError(ASSERT)
        assert self.pending is not None
        self.pending.fill_(0.25)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_loss_is_read_once_the_loops_stream_has_it(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    value = torch.zeros(()).as_subclass(OnGpu)
    fakes = {
        "Event": LateEvent,
        "current_stream": lambda device: "the loop's own",
        "Stream": lambda device: "the reader's",
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(LateEvent, "pending", value)
    monkeypatch.setattr(LateEvent, "is_lost", is_lost)
    batches: list[Batch] = []
    emitter = Emitter(batches.append, interval_s=1e6)
    emitter.put("loss", value, 1, 0)
    emitter.put("loss", 0.5, 2, 0)
    emitter.close()
    [batch] = batches
    found = [float(each["value"]) for each in batch.records]
    assert found[1] == 0.5
    assert found[0] == pytest.approx(float("nan") if is_lost else 0.25, nan_ok=True)


def test_what_a_batch_has_on_the_cpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def note(name: str) -> Any:
        return lambda self, *args, **more: done.append((name, args, more)) or self

    monkeypatch.setattr(torch.Tensor, "pin_memory", note("pin"))
    monkeypatch.setattr(torch.Tensor, "to", note("to"))
    copied = ("to", (GPU,), {"non_blocking": True})
    to_device({"x": torch.ones(1)}, GPU)
    assert done == [("pin", (), {}), copied]
    done.clear()
    to_device([torch.ones(1, device="meta")], GPU)
    assert done == [copied]


# ---- what a device is called ----


def test_a_gpu_is_named_with_its_place_on_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", pci_domain_id=0, pci_bus_id=27, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert devices.describe(GPU) == {
        "model": "NVIDIA H100 80GB HBM3",
        "bus": "00000000:1B:00.0",
    }
    assert devices.describe(torch.device("cpu")) == {}


def test_the_table_of_ranks_has_the_models_of_gpus(lab: Lab) -> None:
    assert "model" not in lab.status()
    lab.run(
        "from labkit.rank.engine import requests\n"
        "own = requests.describe\n"
        "requests.describe = lambda device: {'model': 'T4', 'bus': f'{rank}'}"
    )
    table = lab.status()
    lab.run("requests.describe = own")
    assert list(table.columns)[2:6] == ["device", "model", "bus", "state"]
    assert list(table["bus"]) == ["0", "1"]


# ---- memory ----


class Allocator:
    """Torch's of one GPU, as far as its peak goes."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def hold(self, num_bytes: int) -> None:
        self.held = num_bytes
        self.peak = max(self.peak, num_bytes)

    def read(self, device: Any = None) -> int:
        return self.peak

    def reset(self, device: Any = None) -> None:
        self.peak = self.held


def test_the_peak_of_a_step_leaves_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator()
    for name, method in (("_read_peak", "read"), ("_reset_peak", "reset")):
        monkeypatch.setattr(memory, name, getattr(allocator, method))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", memory._read_peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", memory._reset_peak)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory.PeakOfStep, "_earlier", {})
    allocator.hold(900)
    allocator.hold(100)
    for step_peak in (500, 300):
        peak = memory.PeakOfStep(GPU)
        allocator.hold(step_peak)
        allocator.hold(100)
        assert peak.read() == step_peak
        for device in (None, 0, "cuda:0", GPU):
            assert torch.cuda.max_memory_allocated(device) == 900
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 100
    peak = memory.PeakOfStep(GPU)
    allocator.hold(200)
    assert peak.read() == torch.cuda.max_memory_allocated() == 200


# ---- training ----


def test_zero_has_larger_buckets_on_gpus() -> None:
    options = TrainOptions()
    zero = deepspeed_config(options, 2, 10**9, "cuda")["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 50_000_000
    zero = deepspeed_config(options, 2, 10**9, "cpu")["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 2_000_000
    assert bucket_elements(800, "cuda") == bucket_elements(800, "cpu") == 101


def test_messages_of_small_models_are_not_too_small() -> None:
    sizes = 800, 10**6, 4 * 10**6
    found = [bucket_elements(n, "cpu", stage=2) for n in sizes]
    assert found == [800, 262_144, 500_001]


def test_deepspeed_is_told_the_number_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    for device, number in (("cuda:1", "1"), ("cpu", "5")):
        with numbered_as(torch.device(device)):
            assert os.environ["LOCAL_RANK"] == number
        assert os.environ["LOCAL_RANK"] == "5"


def test_a_norm_on_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.ones(()).as_subclass(OnGpu)
    assert read_if_here(norm) is norm
    assert read_if_here(torch.ones(())) == 1.0
    assert isinstance(read_if_here(torch.ones(())), float)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_the_norm_of_offloaded_shards_is_that_of_the_whole(
    lab: Lab, strategy: str
) -> None:
    lab.train(
        strategy,
        SHARDED.replace(
            "    optimizer.step()",
            "    shards = [p.grad for p in model.parameters()]\n"
            "    found = norm_of_parts(shards, device).item()\n"
            "    whole = [each.full_tensor() for each in shards]\n"
            "    expected = torch.nn.utils.get_total_norm(whole).item()\n"
            "    optimizer.step()",
        ).replace(
            "net =",
            "from labkit.strategies.model.shards import norm_of_parts\nnet =",
        ),
        live=False,
    )
    assert lab.pull("found", "all") == pytest.approx(lab.pull("expected", "all"))
    assert lab.pull("found") > 0


def test_the_norm_of_parts_keeps_range_and_precision(lab: Lab) -> None:
    doubles = [torch.tensor([1.0, 1e-9], dtype=torch.float64)]
    assert torch.equal(
        norm_of_parts(doubles, torch.device("cpu")),
        torch.nn.utils.get_total_norm(doubles),
    )
    lab.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "from labkit.strategies.model.shards import norm_of_parts\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
        "large = distribute_tensor(torch.full((4,), 1e19), mesh, [Shard(0)])\n"
        "found = norm_of_parts([large], device)"
    )
    for found in lab.pull("found", "all"):
        torch.testing.assert_close(found, torch.tensor(2e19))


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_batchnorm_makes_no_fp32_copy_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, is_synchronized: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).eval()
    replace_batchnorm(model, synchronize=is_synchronized, is_fp32=False)
    plain, dtypes = torch.nn.functional.batch_norm, []

    def note(x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        if not more:  # torch calls it again for a subclass, with keywords
            dtypes.append(x.dtype)
        return plain(x, *args, **more)

    monkeypatch.setattr(torch.nn.functional, "batch_norm", note)
    x = torch.randn(4, 2).bfloat16()
    expected = model(x)
    found = model(x.as_subclass(OnGpu))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    assert dtypes == [torch.float32, torch.float32 if is_synchronized else x.dtype]


# ---- NCCL's own ways ----


def test_a_batch_that_was_cut_short_is_known() -> None:
    class Group:
        def _start_coalescing(self, device: Any) -> None:
            """As a process group does."""

        def _end_coalescing(self, device: Any) -> None:
            raise RuntimeError("the communicator was aborted")

    batch: Any = c10d.c10d._coalescing_manager
    group: Any = Group()
    with pytest.raises(RuntimeError) as at_end, batch(group, GPU):
        pass
    assert c10d.is_batch_cut(at_end.value)
    on_top = KeyboardInterrupt()  # in what shows the error
    on_top.__context__ = at_end.value
    assert any(map(c10d.is_batch_cut, chain(on_top)))
    assert not c10d.is_batch_cut(RuntimeError("another one"))
    with pytest.raises(KeyboardInterrupt) as within, batch(group, None):
        raise KeyboardInterrupt  # NCCL has not begun anything
    assert not c10d.is_batch_cut(within.value)
    c10d.c10d._world.pg_coalesce_state.clear()


def test_a_default_group_has_the_numbers_of_its_ranks() -> None:
    options = SimpleNamespace()
    group = SimpleNamespace(
        size=lambda: 3, _get_backend=lambda device: SimpleNamespace(options=options)
    )
    c10d.number_ranks(group, GPU)
    assert options.global_ranks_in_group == [0, 1, 2]


AS_NCCL = """
import torch.distributed as dist
from labkit.strategies.mesh import device_mesh

class AsNccl:
    def get_backend(self, group):
        return "nccl"
    def __getattr__(self, name):
        return getattr(dist, name)

device_mesh.dist = AsNccl()
"""
TRAINING = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
model, optimizer, loader = prepare(
    model, optimizer, data, batch_size=4, shuffle=False
)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("strategy", "made"),
    [
        ("fsdp", "num_links() == 1"),
        ("zero2", "num_links() == 1"),
        ("pipeline", "device_mesh.another_group.cache_info().misses == 1"),
    ],
)
@pytest.mark.long
def test_numbers_and_messages_have_groups_of_their_own(
    lab: Lab, strategy: str, made: str
) -> None:
    def losses(name: str) -> list[float]:
        run = lab.train(name, TRAINING, live=False, hang_after=0)
        return [float(each) for each in run.mean_loss()["loss"]]

    wanted = losses("single")
    lab.run(AS_NCCL)
    try:
        found = losses(strategy)
        lab.run(f"from labkit.strategies.mesh.links import num_links; assert {made}")
    finally:
        lab.restart(everyone=True)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_work_that_nobody_waits_for_is_none(lab: Lab) -> None:
    lab.run(
        "from types import SimpleNamespace\n"
        "from labkit.rank.measuring import step_profiler\n"
        "unboxed = SimpleNamespace(unbox=lambda work: None)\n"
        "step_profiler.dist = SimpleNamespace(Work=unboxed)"
    )
    try:
        run = lab.train("ddp", TRAINING, live=False, hang_after=0)
    finally:
        lab.run("step_profiler.dist = dist")
    assert len(run.comm)


def test_layers_are_not_split_among_ranks_that_share_a_gpu(lab: Lab) -> None:
    lab.run(
        "from labkit.strategies.tensor.split import check_backend\n"
        "check_backend(device)"
    )
    with pytest.raises(RankError, match="--device cpu"):
        lab.run("check_backend(torch.device('cuda', 0))")


# ---- states that an optimizer brings ----


@pytest.mark.parametrize("capturable", [False, True])
def test_states_follow_their_parameters(capturable: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))  # as a device
    optimizer = torch.optim.AdamW([weight], capturable=capturable)
    optimizer.state[weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.ones(2),
        "exp_avg_sq": torch.ones(2),
    }
    move_states(optimizer)
    kinds = {name: t.device.type for name, t in optimizer.state[weight].items()}
    count = "meta" if capturable else "cpu"
    assert kinds == {"step": count, "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_states_in_lists_and_of_scalars_follow_their_parameters() -> None:
    scalar = torch.nn.Parameter(torch.ones((), device="meta"))
    plain = torch.nn.Parameter(torch.ones(1, device="meta"))
    optimizer = torch.optim.SGD([scalar, plain], lr=0.1)
    optimizer.state[scalar] = {"exp_avg": torch.tensor(1.0), "step": torch.tensor(1.0)}
    optimizer.state[plain] = {"old_dirs": [torch.ones(1)], "ro": None, "n_iter": 3}
    move_states(optimizer)
    state = optimizer.state[scalar]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")
    assert optimizer.state[plain]["old_dirs"][0].device.type == "meta"
    assert optimizer.state[plain]["n_iter"] == 3


def test_a_part_of_the_update_on_the_cpu_loses_no_states() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    offload = {"device": "cpu", "ratio": 0.5}
    config = {"zero_optimization": {"offload_optimizer": offload}}
    with pytest.raises(UnsupportedLoopError, match=r"0\.5.*leave ratio out"):
        check_ratio(config, optimizer)
    offload["ratio"] = 1.0
    check_ratio(config, optimizer)
    check_ratio({"zero_optimization": {"offload_optimizer": "cpu"}}, optimizer)


def test_a_tensor_elsewhere_is_on_the_gpu_that_it_is_on_there() -> None:
    for device, number in ((torch.device("cuda", 3), 3), (torch.device("cpu"), -1)):
        assert elsewhere(torch.empty(2, device="meta"), device).get_device() == number


# ---- messages ----


def test_nccl_is_given_what_is_on_the_device() -> None:
    """Another rank may ask for a state that a loop has made on the CPU."""
    group: Any = "over NCCL"
    control: Any = "over gloo"
    channel = Channel(group, control, torch.device("meta"))
    assert channel._as_sent(torch.ones(2)).is_meta
