"""Links between ranks: what they exchange arrives whole; who is missing is named."""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from typing import NamedTuple

import pytest
import torch.distributed as dist
from kernels import wait_until

from labkit import Lab
from labkit import RankError
from labkit.checks import UserError
from labkit.key_server import KeyServer
from labkit.key_server import Meeting
from labkit.notebook.execution import errors
from labkit.rank.group.store import LabStore
from labkit.strategies.mesh import links
from labkit.strategies.mesh.links import Links
from labkit.strategies.mesh.peers import in_rows

pytestmark = pytest.mark.timeout(90)

LONG_S = 50.0
SHORT_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyServer]:
    server = KeyServer(Meeting(str(tmp_path / "store")))
    yield server
    server.close()


def together(size: int, do: Callable[[int], Any]) -> list[Any]:
    """What each of so many ranks gets, which are threads here."""
    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(do, range(size))]


def linked(
    server: KeyServer, size: int, timeout_s: float = LONG_S, number: int = 0
) -> list[Links]:
    def made(rank: int) -> Links:
        store = LabStore(server.meeting, timedelta(seconds=LONG_S))
        found = Links([*range(size)], rank, timeout_s)
        found.make(dist.PrefixStore(str(number), store), apart=False)
        return found

    return together(size, made)


def exchanged(each: Links, payload: bytes, *, apart: bool = False) -> dict[int, bytes]:
    return each.wait(each.begin(payload, apart=apart))


@pytest.mark.parametrize("size", [2, 5])
def test_each_gets_the_bytes_of_all_others(server: KeyServer, size: int) -> None:
    ranks = linked(server, size)

    def sent(rank: int, number: int) -> bytes:
        return b"%d of %d " % (number, rank) * (rank + number)

    def run(rank: int) -> list[dict[int, bytes]]:
        return [exchanged(ranks[rank], sent(rank, number)) for number in range(20)]

    for rank, found in enumerate(together(size, run)):
        assert found == [
            {other: sent(other, n) for other in range(size) if other != rank}
            for n in range(20)
        ]


def test_more_than_a_connection_holds_goes_both_ways_at_once(server: KeyServer) -> None:
    ranks = linked(server, 3)
    sent = [bytes([rank]) * 30_000_000 for rank in range(3)]
    for rank, found in enumerate(together(3, lambda n: exchanged(ranks[n], sent[n]))):
        assert found == {other: sent[other] for other in range(3) if other != rank}


def test_a_wait_after_a_long_message_sleeps(server: KeyServer) -> None:
    ranks = linked(server, 2)
    together(2, lambda rank: exchanged(ranks[rank], bytes(30_000_000)))
    ranks[0].timeout_s = SHORT_S
    began = time.thread_time()
    with pytest.raises(RuntimeError, match="did not come"):
        exchanged(ranks[0], b"0")
    assert time.thread_time() - began < SHORT_S / 2


def test_what_is_sent_apart_meets_nothing_else(server: KeyServer) -> None:
    one, other = linked(server, 2)
    key = one.begin(b"a step", apart=False)
    apart = one.begin(b"a batch", apart=True)
    theirs = other.begin(b"their batch", apart=True)
    assert other.wait(theirs) == {0: b"a batch"}
    assert one.wait(apart) == {1: b"their batch"}
    assert other.wait(other.begin(b"their step", apart=False)) == {0: b"a step"}
    assert one.wait(key) == {1: b"their step"}


def test_threads_of_a_rank_may_wait_in_any_order(server: KeyServer) -> None:
    one, other = linked(server, 2)
    keys = [one.begin(b"%d" % number, apart=False) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(one.wait, key) for key in reversed(keys)]
        wait_until(lambda: one.waits_since_ns > 0, LONG_S, "a thread waits")
        for number in range(3):
            assert exchanged(other, b"theirs %d" % number) == {0: b"%d" % number}
        found = [each.result() for each in reversed(waits)]
    assert found == [{1: b"theirs %d" % number} for number in range(3)]


def test_what_nobody_waits_for_is_not_kept_for_ever(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_MOST_KEPT", 10)
    one, other = linked(server, 2)
    for _ in range(50):
        one.begin(b"1", apart=True)
        exchanged(other, b"2", apart=True)
    assert exchanged_by(one, other) == {1: b"last"}
    assert len(one._came) <= 11


def exchanged_by(one: Links, other: Links) -> dict[int, bytes]:
    key = one.begin(b"", apart=False)
    exchanged(other, b"last")
    return one.wait(key)


class Interrupt:
    """As a profiler of Python's: interrupts this thread when a call of that number
    begins, or returns from C. There Python handles signals."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        is_there = frame.f_code.co_filename in (links.__file__, threading.__file__)
        if is_there and event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.parametrize("waits", [False, True], ids=["all is there", "waits"])
def test_an_interrupt_wherever_it_comes_is_one_and_leaves_no_lock(
    server: KeyServer, waits: bool
) -> None:
    number, is_over = 0, False
    while not is_over:
        number += 1
        one, other = linked(server, 2, number=number)
        with ThreadPoolExecutor(1) as threads:
            if waits:
                threads.submit(begin_when_awaited, other, one)
            else:
                other.begin(b"theirs", apart=False)
            interrupt = Interrupt(number)
            sys.setprofile(interrupt)
            try:
                exchanged(one, b"ours")
                is_over = True
            except KeyboardInterrupt:
                one.waits_since_ns = 1  # for the thread
            finally:
                sys.setprofile(None)
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(one._changed.acquire, blocking=False).result()
        one.close()
        other.close()
    assert number > 20


def begin_when_awaited(one: Links, other: Links) -> None:
    wait_until(lambda: other.waits_since_ns > 0, LONG_S, "it is waited for")
    one.begin(b"theirs", apart=False)


def test_whoever_does_not_know_the_token_is_turned_away(server: KeyServer) -> None:
    """As another user of the host, who connects before the ranks do."""
    foreign: list[socket.socket] = []

    class Watched(LabStore):
        def set(self, key: str, value: str | bytes) -> None:
            if key == "at/0":
                address, port, _ = str(value).split()
                for hello in (b"x" * 36, b"short"):
                    foreign.append(socket.create_connection((address, int(port))))
                    foreign[-1].sendall(hello)
            super().set(key, value)

    def connected(rank: int) -> Any:
        store = Watched(server.meeting, timedelta(seconds=LONG_S))
        return links.connect(store, rank, 2, LONG_S)

    one, other = together(2, connected)
    assert one[1].getpeername() == other[0].getsockname()
    for each in foreign:
        each.settimeout(LONG_S)
        assert each.recv(1) == b""


def test_the_rank_that_is_gone_is_named_and_no_half_is_taken(server: KeyServer) -> None:
    ranks = linked(server, 3)
    exchanges = [each.begin(b"all", apart=False) for each in ranks]
    ranks[2].close()
    assert ranks[0].wait(exchanges[0]) == {1: b"all", 2: b"all"}
    with pytest.raises(RuntimeError, match="the connection to rank 2 is lost"):
        exchanged(ranks[0], b"more")
    assert ranks[0].is_broken
    with pytest.raises(RuntimeError, match="was cut short"):
        exchanged(ranks[0], b"more")


def test_one_that_has_sent_its_bytes_may_go(server: KeyServer) -> None:
    """As from its last comparison into a group of its own."""
    ranks = linked(server, 3)
    ranks[2].begin(b"2", apart=False)
    ranks[2].close()
    key = ranks[0].begin(b"0", apart=False)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(ranks[0].wait, key)
        wait_until(lambda: ranks[0].links[2].error is not None, LONG_S, "it is seen")
        ranks[1].begin(b"1", apart=False)
        assert waits.result() == {1: b"1", 2: b"2"}


def test_a_wait_ends_and_names_who_has_not_come(server: KeyServer) -> None:
    ranks = linked(server, 3, timeout_s=SHORT_S)
    ranks[1].begin(b"1", apart=False)
    with pytest.raises(RuntimeError, match=r"rank 2 did not come to a comparison"):
        exchanged(ranks[0], b"0")


def test_ranks_that_compare_different_things_get_an_error() -> None:
    with pytest.raises(RuntimeError, match="compare different things"):
        in_rows([bytes(8), bytes(16)], "int64")


class Address(NamedTuple):
    family: int
    address: str


def test_an_address_is_one_that_other_hosts_reach() -> None:
    wide = Address(socket.AF_INET6, "fd00::2")
    found = [
        Address(-1, "02:fc:00:00:00:01"),
        Address(socket.AF_INET6, "fe80::1%eth0"),
        *(wide, Address(socket.AF_INET6, "fd00::3")),
    ]
    assert links.address_among(found) == wide.address
    first = Address(socket.AF_INET, "192.0.2.2")
    found += [first, Address(socket.AF_INET, "192.0.2.3")]
    assert links.address_among(found) == first.address
    assert links.address_among(found[:2]) == ""


# ---- in a lab ----

COMPARES = (
    "from labkit.strategies.mesh.peers import Peers\npeers = Peers(rank, 2, device)"
)
WAITS = f"""
{COMPARES}
kept = rank
peers.agree_on(1)
open(path + str(rank), "w").close()
peers.agree_on(1) if rank == 0 else until()
"""
UNTIL = "import time\ndef until():\n    while True: time.sleep(0.01)\n"


def assert_next_comparison_works(lab: Lab) -> None:
    lab.run(f"{COMPARES}\nfound = peers.greatest([rank, 7 - rank])")
    assert lab.pull("found", "all") == [[1, 7]] * 2


@pytest.fixture
def begun(lab: Lab, tmp_path: Path) -> Callable[[], bool]:
    """Whether all ranks have come to where `WAITS` has one of them wait."""
    path = str(tmp_path / "begun")
    lab.push(path=path)
    lab.run(UNTIL)
    return lambda: all(Path(path + str(rank)).exists() for rank in range(2))


def when(condition: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    def wait_and_do() -> None:
        wait_until(condition, LONG_S, "the ranks have come there")
        do()

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    return thread


def test_an_interrupt_ends_a_comparison(lab: Lab, begun: Callable[[], bool]) -> None:
    thread = when(begun, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(errors.Interrupted):
        lab.run(WAITS)
    thread.join()
    assert lab.pull("kept", "all") == [0, 1]
    assert_next_comparison_works(lab)


def test_a_rank_that_dies_ends_a_comparison(
    lab: Lab, begun: Callable[[], bool]
) -> None:
    lab.run("import os\npid = os.getpid()")
    pid = lab.pull("pid", 1)
    thread = when(begun, lambda: os.kill(pid, signal.SIGKILL))
    ends = r"rank 0: (stopped|.*lost its connection to rank 1)"
    with pytest.raises(RankError, match=ends):
        lab.run(WAITS)
    thread.join()
    lab.restart()
    assert lab.pull("kept", 0) == 0
    assert_next_comparison_works(lab)


def test_a_rank_that_raises_ends_a_comparison(lab: Lab) -> None:
    lab.run(COMPARES)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        lab.run("peers.agree_on(1)\npeers.agree_on(1 // (1 - rank))")
    assert_next_comparison_works(lab)


IN_NEW_GROUP = (
    "from labkit.strategies.mesh.peers import Peers\n"
    "from datetime import timedelta\n"
    "peers = Peers(rank, 2, device, dist.new_group())"
)
"""Whose ranks have no links yet."""


def test_one_that_has_left_ends_the_first_comparison(lab: Lab) -> None:
    lab.run(IN_NEW_GROUP)
    with pytest.raises(UserError, match="ranks wait for a rank") as caught:
        lab.run("if rank == 0: peers.agree_on(1)", hang_after=1)
    told = "rank 1 is not in the cell, and does not come to labkit's comparison #1"
    assert told in str(caught.value)
    assert_next_comparison_works(lab)


def test_links_that_were_not_made_are_made_anew(lab: Lab) -> None:
    """And not found where the first ones would have been."""
    lab.run(IN_NEW_GROUP)
    with pytest.raises(RankError, match="no rank has set"):
        lab.run(
            f"from labkit.compat.c10d import default_store\n"
            f"default_store().set_timeout(timedelta(seconds={SHORT_S}))\n"
            "if rank == 0: peers.agree_on(1)"
        )
    later = f"import time\nif rank == 0: time.sleep({SHORT_S})"  # rank 1 comes first
    lab.run(f"{IN_NEW_GROUP}\n{later}\npeers.agree_on(1)")
    assert_next_comparison_works(lab)


def test_a_group_may_wait_for_longer_than_the_system_can(lab: Lab) -> None:
    lab.run(
        f"{IN_NEW_GROUP}\n"
        "group = dist.new_group(timeout=timedelta(days=115))\n"
        "peers = Peers(rank, 2, device, group)\n"
        "for _ in range(20): peers.agree_on(1)"
    )


def test_a_loop_does_not_see_how_a_comparison_is_profiled(lab: Lab) -> None:
    lab.run(
        f"""
{COMPARES}
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {{}}))
with torch.profiler.profile() as profile, Sees():
    peers.agree_on(1)
marks = [each.name for each in profile.events() if "compare" in each.name]
"""
    )
    assert lab.pull("seen", "all") == [[], []]
    assert lab.pull("marks", "all") == [["labkit: compare 0,1"]] * 2


@pytest.mark.parametrize("in_group", [COMPARES, IN_NEW_GROUP], ids=["later", "first"])
def test_one_in_a_comparison_and_one_in_a_collective_do_not_wait_for_ever(
    lab: Lab, in_group: str
) -> None:
    lab.run(f"{COMPARES}\npeers.agree_on(1)")
    lab.run(f"{in_group}\nx = torch.ones(10)")
    with pytest.raises(UserError, match="wait for each other") as caught:
        lab.run("dist.all_reduce(x) if rank else peers.agree_on(1)", hang_after=2)
    told = (
        r"rank 0: waits to compare with other ranks what the loop does, at line 1.*\n"
        r"rank 1: all_reduce #\d+ of 40 bytes at line 1.*"
        r"\nrank 1 has not come to labkit's comparison #\d+\n"
    )
    assert re.search(told, str(caught.value), re.DOTALL), caught.value
    assert_next_comparison_works(lab)
