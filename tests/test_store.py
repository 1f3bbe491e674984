"""The store of a group: what torch needs of it, how its waits end, what it leaves."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kernels import wait_until

from labkit.key_server import KeyServer
from labkit.key_server import Meeting
from labkit.rank.group.store import LabStore

pytestmark = pytest.mark.timeout(60)

LONG = timedelta(seconds=50)
SHORT = timedelta(milliseconds=50)


@pytest.fixture(params=["on one host", "on several"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyServer]:
    place = Meeting(str(tmp_path / "store"))
    if request.param == "on several":
        place = Meeting(address=("127.0.0.1", 0), name="store-1")
    server = KeyServer(place)
    yield server
    server.close()


@pytest.fixture
def store(server: KeyServer) -> LabStore:
    return LabStore(server.meeting, LONG)


def uses(store: Any) -> list[Any]:
    """What torch, gloo, NCCL and rpc do with a store, and what they got."""
    prefixed = dist.PrefixStore("group", store)
    store.set("text", "words")
    prefixed.set("bytes", bytes(range(256)))  # type: ignore[arg-type]
    got = [store.get("text"), prefixed.get("bytes"), store.get("group/bytes")]
    got += [prefixed.add("count", 3), prefixed.add("count", -1), store.get("text")]
    got += [prefixed.get("count"), store.check(["text"]), store.check(["text", "no"])]
    got += [store.compare_set("token", "", "mine"), store.get("token")]
    got += [prefixed.compare_set("token", "", "mine")]
    got += [store.compare_set("token", "", "yours"), store.get("token")]
    got += [store.compare_set("token", "mine", "yours"), store.get("token")]
    got += [store.num_keys(), store.delete_key("text"), store.delete_key("text")]
    got += [store.check(["text"]), store.wait(["token"]), store.wait(["token"], SHORT)]
    got += [prefixed.num_keys(), prefixed.delete_key("count")]
    prefixed.multi_set(["one", "two"], ["1", "2"])
    prefixed.append("two", "3")
    prefixed.append("three", "4")
    got += [store.has_extended_api(), prefixed.multi_get(["two", "one", "three"])]
    got += [store.multi_get(["group/two"]), store.multi_get([])]
    clone = prefixed.clone()  # type: ignore[attr-defined]
    clone.set("by clone", "x")
    got += [clone.get("bytes"), store.get("group/by clone"), store.num_keys()]
    for wait in (
        lambda: store.wait(["never"], SHORT),
        lambda: dist.PrefixStore("group", store).wait(["never"], SHORT),
    ):
        with pytest.raises(dist.DistStoreError):
            wait()
    clone.set_timeout(SHORT)  # as init_rpc does
    with pytest.raises(dist.DistStoreError):
        clone.get("never")
    with pytest.raises(dist.DistStoreError):
        clone.multi_get(["by clone", "never"])
    return got


def test_it_answers_as_a_store_of_torchs(store: LabStore, server: KeyServer) -> None:
    assert uses(store) == uses(dist.HashStore())
    assert store.timeout == LONG, "a clone has its own"
    assert LabStore(server.meeting, LONG).get("token") == b"yours"


def test_over_tcp_a_stranger_can_neither_read_nor_serve() -> None:
    server = KeyServer(Meeting(address=("127.0.0.1", 0), name="store-1"))
    LabStore(server.meeting, LONG).set("a", "b")
    stranger = Meeting(address=server.meeting.address, name="store-1")
    with pytest.raises(ConnectionError, match="does not know its secret"):
        LabStore(stranger, LONG)
    # Neither does one that says nothing keep others waiting, or what it says hurt.
    with socket.create_connection(server.meeting.address) as silent:
        silent.sendall(b'["get", "a", 1]\n')
        assert LabStore(server.meeting, LONG).get("a") == b"b"
        assert b'"b"' not in silent.recv(1000)
    server.close()
    # A stranger that listens there is not told what a rank sets.
    other = KeyServer(replace(server.meeting, secret=b"another"))
    with pytest.raises(ConnectionError, match="does not know its secret"):
        LabStore(server.meeting, LONG)
    other.close()


def test_a_value_that_comes_later_is_waited_for(
    store: LabStore, server: KeyServer
) -> None:
    other = LabStore(server.meeting, LONG)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(store.get("later")))
    waiting.start()
    other.set("other", "x")
    assert not got
    other.set("later", "y")
    waiting.join()
    assert got == [b"y"]


def test_a_store_that_is_closed_ends_its_waits_and_no_others(
    store: LabStore, server: KeyServer
) -> None:
    prefixed: Any = dist.PrefixStore("group", store)
    clone = prefixed.clone()
    other = LabStore(server.meeting, LONG)
    said: list[str] = []
    got: list[bytes] = []

    def wait(each: Any) -> None:
        try:
            each.get("never")
        except dist.DistNetworkError as error:
            said.append(str(error))

    threads = [threading.Thread(target=wait, args=(s,)) for s in (prefixed, clone)]
    waiting = threading.Thread(target=lambda: got.append(other.get("later")))
    for thread in (*threads, waiting):
        thread.start()
    store.close()
    for thread in threads:
        thread.join()
    assert len(said) == 2
    for each in (store, clone, store.clone()):
        with pytest.raises(dist.DistNetworkError, match="has been left"):
            each.set("a", "b")
    assert waiting.is_alive()
    LabStore(server.meeting, LONG).set("later", "y")
    waiting.join()
    assert got == [b"y"]


def test_a_server_that_is_closed_ends_all_waits(tmp_path: Path) -> None:
    server = KeyServer(Meeting(str(tmp_path / "store")))
    store = LabStore(server.meeting, LONG)
    threading.Timer(0.1, server.close).start()
    with pytest.raises(dist.DistNetworkError):
        store.get("never")
    wait_until(
        lambda: not Path(server.meeting.path).exists(), 10, "its socket is there"
    )
    with pytest.raises(dist.DistNetworkError):
        store.get("never")


def test_a_wait_hears_a_signal_and_its_answer_is_not_taken_for_another(
    store: LabStore, server: KeyServer, request: pytest.FixtureRequest
) -> None:
    # A shell ignores it in what it runs in the background, such as these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    main = threading.main_thread().ident
    assert main is not None
    signals = (main, signal.SIGINT)
    threading.Timer(0.2, lambda: signal.pthread_kill(*signals)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.PrefixStore("group", store).get("late")
    assert store.is_broken
    LabStore(server.meeting, LONG).set("group/late", "too late")
    store.set("now", "in time")
    assert store.get("now") == b"in time"


def test_what_has_left_the_groups_store_behind_says_so(server: KeyServer) -> None:
    kept = dist.PrefixStore("group", LabStore(server.meeting, LONG))
    with pytest.raises(RuntimeError):
        kept.get("x")


def test_a_client_that_dies_in_the_middle_of_a_word_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    server = KeyServer(Meeting(str(tmp_path / "store")))
    store = LabStore(server.meeting, LONG)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server.meeting.path)
        client.send(b'["set", "cut sho')
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert not store.check(["cut sho"])
    server.close()
    assert not raised


def test_a_long_path_will_do(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    server = KeyServer(Meeting(str(folder / "store")))
    LabStore(server.meeting, LONG).set("a", "b")
    assert LabStore(server.meeting, LONG).get("a") == b"b"
    server.close()
    assert not [*folder.iterdir()]


def test_a_server_leaves_nothing_though_a_child_was_forked(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir()), set(threading.enumerate())
    server = KeyServer(Meeting(str(tmp_path / "store")))
    store = LabStore(server.meeting, LONG)
    store.set("a", "b")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        server.close()
        with pytest.raises(dist.DistNetworkError):
            store.get("a")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # What earlier tests have left may go meanwhile.
    assert set(Path("/proc/self/fd").iterdir()) <= before[0]
    assert set(threading.enumerate()) <= before[1]
    assert not [*tmp_path.iterdir()]
