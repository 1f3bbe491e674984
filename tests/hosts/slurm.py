"""Slurm for tests: its controller here, and its daemon on each of some hosts."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

from namespaces import SUBNET
from namespaces import Namespace

NEEDED = ("munged", "slurmctld", "slurmd", "srun")
_SBIN = ("/usr/sbin", "/sbin")
_CONFIG = """\
ClusterName=labkit
SlurmctldHost={here}({subnet}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
SlurmdTimeout=600
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=4 RealMemory=1000 "
    "Gres=gpu:2"
)
START_S = 60


def why_not() -> str:
    """Why there is no Slurm here; "" where there is."""
    missing = [name for name in NEEDED if program(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return ""


def program(name: str) -> str | None:
    """The path of a program of the system's, also where it is for root alone."""
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *_SBIN]))


def jobs() -> list[str]:
    """The numbers of the jobs that run or wait."""
    told = subprocess.run(
        ["squeue", "--noheader", "--format=%i"],
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.split()


@contextlib.contextmanager
def running(place: Path, hosts: Sequence[Namespace]) -> Iterator[Path]:
    """Slurm with a node of the name of each host, in a folder of its own at `place`;
    its configuration file, which SLURM_CONF is to name."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=place))
    folder.chmod(0o755)  # munged's socket is for everyone
    for name in ("state", *(f"spool-{host.name}" for host in hosts)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    config = folder / "slurm.conf"
    # Devices that are no GPUs, but Slurm counts them, and says which a step has.
    (folder / "gres.conf").write_text(
        "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n"
    )
    nodes = "\n".join(_NODE.format(name=e.name, address=e.address) for e in hosts)
    config.write_text(
        _CONFIG.format(
            folder=folder, here=socket.gethostname(), subnet=SUBNET, nodes=nodes
        )
    )
    daemons = {
        "munged": [
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
        ],
        "slurmctld": ["slurmctld", "-D", "-c", "-f", str(config)],
    }
    with contextlib.ExitStack() as ending:
        environment = {**os.environ, "SLURM_CONF": str(config)}
        start = ending.enter_context
        start(_daemon(folder, "munged", daemons["munged"], environment))
        _until(lambda: (folder / "munge.socket").exists(), folder / "munged.log")
        start(_daemon(folder, "slurmctld", daemons["slurmctld"], environment))
        for host in hosts:
            slurmd = ["slurmd", "-D", "-N", host.name, "-f", str(config)]
            # `ip netns exec` would mount a /sys without control groups.
            within = ["nsenter", f"--net=/run/netns/{host.name}"]
            start(_daemon(folder, f"slurmd {host.name}", slurmd, environment, within))

        def are_up() -> bool:
            states = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            return states.stdout.split() == ["idle"] * len(hosts)

        _until(are_up, folder / "slurmctld.log")
        yield config


@contextlib.contextmanager
def _daemon(
    folder: Path,
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    within: Sequence[str] = (),
) -> Iterator[None]:
    path = program(command[0])
    assert path is not None
    with (folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            [*within, path, *command[1:]],
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


def _until(holds: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
