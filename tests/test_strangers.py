"""Other users of the host: what they can reach, and that it changes nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from kernels import wait_until
from torch.distributed.checkpoint import DefaultSavePlanner

import labkit
from labkit import Lab
from labkit.checkpoint.exchange import plan_from_json
from labkit.checkpoint.exchange import plan_to_json
from labkit.checkpoint.manifest import DTYPES
from labkit.host import watchdog

pytestmark = pytest.mark.timeout(120)

NOBODY = 65534
STRANGER = Path(__file__).with_name("strangers.py")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0's, of a client."""
FORK_SERVER = "labkit.rank.engine.fork_server"
NUM_STEPS = 60
TRAINING = f"""
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
loss = torch.nn.functional.mse_loss
fit(model, data, loss, optimizer=optimizer, batch_size=4, epochs={NUM_STEPS // 2})
"""


@pytest.fixture(scope="module")
def own_lab() -> Iterator[Lab]:
    with Lab(num_ranks=2, group_timeout_s=30) as lab:
        yield lab


def listening(lab: Lab) -> dict[int, set[str]]:
    """The ports on which the lab listens, and the names of the processes that do."""
    token = lab._running().cluster.host.token
    found: dict[int, set[str]] = {}
    for process in watchdog.find_processes(token):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM:
                    assert each.laddr.ip == "127.0.0.1", command
                    found.setdefault(each.laddr.port, set()).add(command)
    return found


def is_encrypted(port: int) -> bool:
    """Whether what listens there speaks ZeroMQ's CURVE."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as own:
        own.settimeout(1)
        with suppress(OSError):
            own.sendall(GREETING)
            got = b""
            while len(got) < 32 and (more := own.recv(64)):
                got += more
            return got[12:32].rstrip(b"\0") == b"CURVE"
    return False


@contextmanager
def stranger(lab: Lab) -> Iterator[list[str]]:
    """Another user attacks all ports of the lab meanwhile, also those that come; in
    the list is, afterwards, what was heard."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    command = [sys.executable, str(STRANGER)]
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    uid = psutil.Process(process.pid).uids
    assert process.stdout.readline() == "another user\n"
    assert uid().effective == NOBODY
    is_over = threading.Event()

    def feed() -> None:
        known: set[int] = set()
        while not is_over.wait(0.05):
            for port in {*listening(lab)} - known:
                known.add(port)
                print(port, file=process.stdin, flush=True)

    feeding = threading.Thread(target=feed)
    feeding.start()
    heard: list[str] = []
    try:
        yield heard
    finally:
        is_over.set()
        feeding.join()
        num_attacked, words = json.loads(process.communicate(timeout=30)[0])
        heard += words
    assert num_attacked >= len(listening(lab))


@pytest.mark.long
def test_each_listening_socket_is_known(own_lab: Lab) -> None:
    own_lab.train("hsdp", TRAINING, live=False)
    others = []
    for port, commands in listening(own_lab).items():
        if not is_encrypted(port):
            others += commands
    # Gloo's, one a group of each rank's, which torch does not encrypt; and no store's.
    assert {re.sub(".* ", "", each) for each in others} <= {FORK_SERVER}
    own_lab.run("num_groups = len(dist.distributed_c10d._world.pg_map)")
    assert len(others) <= sum(own_lab.pull("num_groups", "all"))
    own_lab.run("import os\nport = int(os.environ['MASTER_PORT'])")
    assert {*own_lab.pull("port", "all")}.isdisjoint(listening(own_lab))


OF_ANOTHER_USER = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for use in (os.listdir, os.stat, open, socket.socket(socket.AF_UNIX).connect):
    try:
        use(sys.argv[1])
    except PermissionError:
        print("refused")
"""


def test_a_stranger_does_not_reach_the_store_of_the_group(own_lab: Lab) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    [store] = Path(own_lab._running().cluster.folder).glob("store-*")
    assert store.is_socket()
    command = [sys.executable, "-c", OF_ANOTHER_USER, str(store)]
    assert subprocess.check_output(command, text=True).split() == ["refused"] * 4


def test_keys_are_for_the_owner_alone(own_lab: Lab) -> None:
    folder = Path(own_lab._running().cluster.folder)
    files = [each for each in folder.rglob("*") if each.is_file()]
    keys = {
        value
        for each in folder.rglob("*client.json")
        for name, value in json.loads(each.read_text()).items()
        if name in ("key", "curve_serverkey")
    }
    assert len(keys) == 2
    assert all(len(key) >= 40 for key in keys)
    assert folder.stat().st_mode & 0o777 == 0o700
    for each in files:
        if any(key.encode() in each.read_bytes() for key in keys):
            assert each.stat().st_mode & 0o777 == 0o600, each
    secrets = {*keys, own_lab._running().cluster.host.token}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            assert not any(key in " ".join(process.cmdline()) for key in secrets)


def test_a_stranger_hears_nothing_and_breaks_nothing(own_lab: Lab) -> None:
    before = own_lab.run("x = 1")
    with stranger(own_lab) as heard:
        own_lab.run("x += 1")
        run = own_lab.train("ddp", TRAINING, live=False)
        own_lab.run("x += 1; secret = 'never to be heard'; print(secret)")
        assert set(own_lab.status()["state"]) == {"idle"}
    assert before is None
    assert own_lab.pull("x", "all") == [3, 3]
    assert len(run.history) == 2 * NUM_STEPS
    assert not any("never" in each or "hello" in each for each in heard)


def test_a_group_forms_while_a_stranger_knocks(own_lab: Lab) -> None:
    with stranger(own_lab):
        for rank in (0, 1):
            os.kill(own_lab._running().cluster.pids[rank], signal.SIGKILL)
            wait_until(lambda: bool(own_lab._running().dead()), 20, "it is seen")
            own_lab.restart()
            own_lab.run("total = torch.ones(1); dist.all_reduce(total)")
            assert own_lab.pull("total", "all") == [2, 2]


def test_what_comes_from_a_group_is_not_unpickled() -> None:
    root = Path(labkit.__file__).parent
    for path in root.rglob("*.py"):
        words = re.findall(r"dist\.\w+_object\w*\(", path.read_text())
        assert not words, path


def test_a_plan_is_what_it_was() -> None:
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )
    tensors = {str(d): torch.ones(2, 3).to(d) for d in DTYPES.values()}
    planner.set_up_planner({**tensors, "scalar": torch.ones(())}, is_coordinator=True)
    plan = planner.create_local_plan()
    there = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert there.items == plan.items
    with pytest.raises(ValueError, match="is not a dtype"):
        plan_from_json([["x", "TENSOR", [0], [1], [1], "torch.save"]])
