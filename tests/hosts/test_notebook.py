"""The notebook about two hosts runs on two, as it is saved, and so does its script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Namespace
from test_course import script_of

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(660)]

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "17_go_to_two_hosts.ipynb"
TAKES_S = 600


@pytest.mark.usefixtures("four", "nothing_left")
def test_its_outputs_are_those_of_two_hosts() -> None:
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", NOTEBOOK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TAKES_S,
    )
    assert tested.returncode == 0, tested.stdout


@pytest.mark.release
def test_its_script_has_the_same_losses_under_torchrun(
    four: list[Namespace], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(script_of(NOTEBOOK))
    running = []
    for host in four[:2]:
        running.append(
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", host.name),
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", "2", "--nproc-per-node", "2"),
                    *("--rdzv-backend", "c10d"),
                    *("--rdzv-endpoint", f"{four[0].address}:29400"),
                    # Which it knows by itself where hosts have names of their own.
                    *("--rdzv-conf", f"is_host={int(host is four[0])}"),
                    *("--local-addr", host.address),
                    str(script),
                ],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    told = [each.communicate(timeout=TAKES_S)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert told[0].strip() in NOTEBOOK.read_text()
    assert "loss of step" in told[0]
