"""Decides which rank gets which device, before anything is started."""

import os
import shlex
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from typing import Any

from labkit import timeouts
from labkit.checks import check_choice
from labkit.checks import check_count
from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.control_groups import memory_total
from labkit.host.devices import count_gpus
from labkit.host.devices import num_cores
from labkit.host.facts import address_of
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.hosts.hosts import check_hosts
from labkit.notebook.hosts.hosts import check_interface
from labkit.notebook.hosts.hosts import find_hosts
from labkit.notebook.hosts.hosts import parse_hosts
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.mpi import Mpi
from labkit.notebook.hosts.profiles.launcher import Profile
from labkit.notebook.hosts.profiles.launcher import check_profile
from labkit.notebook.hosts.slurm import Slurm
from labkit.notebook.hosts.ssh import Ssh
from labkit.options import check_values
from labkit.options import option
from labkit.records import Placement
from labkit.records import format_bytes

LOADING_TORCH = "loading torch"
"""The stage of a start at which another process works, and this one waits."""

DEFAULT_CPU_RANKS = 2
BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")
LAUNCHERS = ("local", "ssh", "slurm", "mpi")
MAX_HOSTS = 4096
MAX_THREADS = 1024
MAX_TIMEOUT_S = 1e7
KEEP_MINUTES = 30
MAX_KEEP_MINUTES = 60 * 24 * 30
RANK_BYTES = 200 * 2**20
"""What an idle rank on the CPU has to itself: torch, and an IPython kernel."""


def check_num_ranks(what: str, num_ranks: Any) -> None:
    """ValueError unless it is a number of ranks."""
    if not is_int(num_ranks) or num_ranks < 1:
        raise ValueError(
            f"{short_repr(num_ranks)} ranks; choose 1 or more, for example -n 2"
        )


def check_memory(num_ranks: int, memory: int) -> None:
    """ValueError unless a machine's memory, in bytes, holds so many idle ranks."""
    most = max(memory // RANK_BYTES, 1)
    if num_ranks > most:
        raise ValueError(
            f"{short_repr(num_ranks)} ranks do not fit into the "
            f"{format_bytes(memory)} of this machine, which hold {most} at most, at "
            f"{format_bytes(RANK_BYTES)} for an idle one; choose fewer, for example "
            "-n 2"
        )


def check_words(what: str, value: Any) -> None:
    """ValueError unless a shell would take it apart into words."""
    try:
        shlex.split(value if isinstance(value, str) else "'")
    except ValueError as error:
        raise ValueError(
            f"{what} is {short_repr(value)}; write options as in a shell ({error})"
        ) from None


def check_group_timeout(what: str, value: Any) -> None:
    """ValueError unless a process group can have this timeout."""
    if not (is_number(value) and 0 < value <= MAX_TIMEOUT_S):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a positive number of seconds, "
            f"{MAX_TIMEOUT_S:,.0f} at most"
        )


def check_keep(what: str, value: Any) -> None:
    """ValueError unless a lab can be kept for so many minutes."""
    if not (is_number(value) and 0 < value <= MAX_KEEP_MINUTES):
        typed = short_repr(value).removesuffix(".0")
        raise ValueError(
            f"--{what} {typed}: give the minutes without a kernel, more than 0 and at "
            f"most {MAX_KEEP_MINUTES:,}"
        )


@dataclass(frozen=True)
class StartOptions:
    """What `%dist_start` says about the ranks, and `Lab` takes."""

    num_ranks: int | None = option(
        None,
        "how many ranks; by default one per visible GPU, or 2 on the CPU",
        check_num_ranks,
        metavar="N",
        short="-n",
    )
    backend: str = option(
        "auto",
        "what ranks communicate with: nccl needs a GPU for each rank; with gloo ranks "
        "may share one",
        partial(check_choice, choices=BACKENDS),
        choices=BACKENDS,
    )
    device: str = option(
        "auto",
        "where ranks compute: by default on GPUs where there are any; cpu leaves them "
        "alone",
        partial(check_choice, choices=DEVICES),
        choices=DEVICES,
    )
    threads: int | None = option(
        None,
        "torch threads of a rank for what it does on the CPU",
        partial(check_count, meaning="those of one rank", most=MAX_THREADS),
        metavar="T",
        default_text="OMP_NUM_THREADS, or 1; on GPUs its share of the cores",
    )
    group_timeout_s: float = option(
        timeouts.GROUP_S,
        "how many seconds a collective waits: the timeout of the process group",
        check_group_timeout,
        metavar="SECONDS",
        default_text=f"{timeouts.GROUP_S:g}",
    )
    launcher: str = option(
        "local",
        "where ranks start: local, on this host; ssh or mpi, on the hosts that --hosts "
        "names; slurm, on those of the Slurm job that the notebook runs in, or else of "
        "a new job",
        partial(check_choice, choices=LAUNCHERS),
        choices=LAUNCHERS,
    )
    profile: str | None = option(
        None,
        "start ranks where the engines of this ipyparallel profile start, for example "
        "in jobs of PBS or Grid Engine; ipcluster_config.py in its folder says how",
        check_profile,
        metavar="NAME",
    )
    hosts: str | None = option(
        None,
        "with --launcher ssh or mpi: the hosts, and how many ranks each has; one per "
        "GPU, or 2 on the CPU, where no number is given",
        check_hosts,
        metavar="HOST:N,HOST:N",
    )
    nodes: int | None = option(
        None,
        "with --launcher slurm: the number of hosts; by default all of the job around "
        "the notebook; a new job has 1, or what Slurm needs for -n. With --profile: "
        "how many engines it starts; best is one on each host; by default its "
        "c.Cluster.n, or 1",
        partial(check_count, meaning="hosts", most=MAX_HOSTS),
        metavar="K",
    )
    launcher_options: str | None = option(
        None,
        "more options for salloc or mpiexec, in quotes, such as "
        '"--partition=gpu --time=1:00:00"',
        check_words,
        metavar="OPTIONS",
    )
    interface: str | None = option(
        None,
        "the network interface that connects the hosts, by the same name on all of "
        "them and here; by default the one with the route to them",
        check_interface,
        metavar="NAME",
    )
    keep: float | None = option(
        None,
        "let the ranks outlive the kernel, for %dist_attach in the next one; they end "
        f"after this many minutes without a kernel, {KEEP_MINUTES} where no number is "
        "given",
        check_keep,
        metavar="MINUTES",
        bare=f"{KEEP_MINUTES}",
    )

    @property
    def started_by(self) -> str:
        """The launcher; as "profile:pbs" where that of a profile starts ranks."""
        return self.launcher if self.profile is None else f"profile:{self.profile}"


def in_words(placements: Sequence[Placement]) -> str:
    """Ranks in a few words, as "2 ranks on the CPU, gloo"."""
    devices = sorted({placement.device for placement in placements})
    where = "the CPU" if devices == ["cpu"] else ", ".join(devices)
    if hosts := [*dict.fromkeys(each.host for each in placements if each.host)]:
        where += f" of {', '.join(hosts)}"
    noun = "rank" if len(placements) == 1 else "ranks"
    return f"{len(placements)} {noun} on {where}, {placements[0].backend}"


def too_few(num_gpus: int, processes: str) -> str:
    """As "4 ranks, but 2 GPUs are visible and NCCL needs one for each"."""
    gpus = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
    return f"{processes}, but {gpus} visible and NCCL needs one for each"


def place_ranks(
    options: StartOptions, *, num_gpus: int | None = None
) -> list[Placement]:
    """One placement a rank: a GPU each with NCCL, or the CPU with gloo.

    With the backend gloo several ranks may share a GPU. Raises ValueError for what
    cannot be.
    """
    check_values(options)
    check_memory(options.num_ranks or 0, memory_total())
    return _place_on_host(options, num_gpus, num_cores())


def _place_on_host(
    options: StartOptions, num_gpus: int | None, cores: int, fewer: str = "-n "
) -> list[Placement]:
    """`fewer` is what names a smaller number of ranks, before that number."""
    num_ranks, threads = options.num_ranks, options.threads
    backend, device = options.backend, options.device
    if num_gpus is None:
        num_gpus = 0 if device == "cpu" else count_gpus()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device == "cuda" and not num_gpus:
        raise ValueError(
            "--device cuda: no GPU is visible here; leave it out to use the CPU"
        )
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device == "cpu":
        raise ValueError(
            "--backend nccl needs a GPU for each rank and these ranks are on the CPU; "
            "use --backend gloo, or leave it out"
        )
    if num_ranks is None:
        num_ranks = num_gpus if device == "cuda" else DEFAULT_CPU_RANKS
    if backend == "nccl" and num_ranks > num_gpus:
        raise ValueError(
            f"{too_few(num_gpus, f'{num_ranks} ranks')}; use {fewer}{num_gpus}, or "
            "--device cpu to compute on the CPU, or --backend gloo to let several "
            "ranks share a GPU"
        )
    if threads is None:
        # More would fight for the cores; OMP_NUM_THREADS is the user's own word.
        wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()[:9]
        own = 1 if device == "cpu" else cores // num_ranks
        threads = int(wanted) if wanted.isdecimal() else own
        threads = min(max(threads, 1), MAX_THREADS)
    return [
        Placement(
            rank=rank,
            local_rank=rank,
            world_size=num_ranks,
            device=f"cuda:{rank % num_gpus}" if device == "cuda" else "cpu",
            backend=backend,
            num_threads=threads,
            group_timeout_s=options.group_timeout_s,
        )
        for rank in range(num_ranks)
    ]


_GOES_WITH = {
    "hosts": ("ssh", "mpi"),
    "nodes": ("slurm", "profile"),
    "launcher_options": ("slurm", "mpi"),
    "interface": ("ssh", "slurm", "mpi", "profile"),
}
"""The launchers of each option that is not for all."""


def check_launcher(options: StartOptions) -> None:
    """ValueError unless the options go with the launcher."""
    if options.profile is not None and options.launcher != "local":
        raise ValueError(
            f"--profile {options.profile} and --launcher {options.launcher} exclude "
            "each other: the profile says how engines start; leave one out"
        )
    kind = options.started_by.partition(":")[0]
    for name, launchers in _GOES_WITH.items():
        value = getattr(options, name)
        if value is not None and kind not in launchers:
            flag = name.replace("_", "-")
            *first, last = [each for each in launchers if each != "profile"]
            needed = "--launcher " + " or ".join(filter(None, [", ".join(first), last]))
            if "profile" in launchers:
                needed += ", or --profile"
            without = {
                "local": "the default, local, starts all ranks on this host",
                "profile": f"this is --profile {options.profile}",
            }.get(kind, f"this is --launcher {options.launcher}")
            raise ValueError(f"--{flag} {value} needs {needed}; {without}")
    if options.launcher not in _GOES_WITH["hosts"]:
        return
    if options.hosts is None:
        raise ValueError(
            f"--launcher {options.launcher} needs --hosts, as in --hosts "
            "node1:8,node2:8 (without a number: one rank per GPU, or 2 on the CPU)"
        )
    if options.num_ranks is not None:
        raise ValueError(
            f"-n {options.num_ranks}: --hosts says how many ranks each host has, as in "
            "--hosts node1:2,node2:2; leave -n out"
        )


def place_on_hosts(
    options: StartOptions, *, on_progress: Callable[[str], None] = lambda text: None
) -> tuple[list[Placement], Hosts | None]:
    """One placement a rank, and the hosts that they are on, unless it is this one.

    Every host is asked what it has. Raises ValueError for what cannot be, and UserError
    for a host that is not as it has to be; nothing was started.
    """
    check_values(options)
    check_launcher(options)
    if options.started_by == "local":
        return place_ranks(options), None
    launcher = _launcher(options, on_progress)
    try:
        on_progress("asking the hosts what they have")
        hosts = find_hosts(launcher, interface=options.interface, device=options.device)
        return place_on_found(hosts, options), hosts
    except BaseException:
        launcher.close()
        raise


def _launcher(
    options: StartOptions, on_progress: Callable[[str], None]
) -> HostLauncher:
    words = shlex.split(options.launcher_options or "")
    if options.launcher == "slurm":
        return Slurm(
            num_ranks=options.num_ranks,
            num_hosts=options.nodes,
            options=words,
            on_progress=on_progress,
        )
    if options.profile is not None:
        return Profile(
            options.profile,
            num_ranks=options.num_ranks,
            num_engines=options.nodes,
            address=address_of(options.interface) if options.interface else "",
            on_progress=on_progress,
        )
    specs = parse_hosts(options.hosts)
    return Ssh(specs) if options.launcher == "ssh" else Mpi(specs, words)


def place_on_found(hosts: Hosts, options: StartOptions) -> list[Placement]:
    """One placement a rank on these hosts; ValueError for what cannot be."""
    having = [each.spec.name for each in hosts.found if each.facts.num_gpus]
    device = options.device
    if device == "auto" and 0 < len(having) < len(hosts.found):
        without = [e.spec.name for e in hosts.found if e.spec.name not in having]
        raise ValueError(
            f"GPUs on {', '.join(having)}, none on {', '.join(without)}; use --device "
            "cpu, or only hosts with GPUs"
        )
    places = []
    for number, host in enumerate(hosts.found):
        facts = host.facts
        local = replace(options, num_ranks=host.spec.num_ranks)
        try:
            check_memory(host.spec.num_ranks or 0, facts.memory_bytes)
            fewer = f"--hosts {host.spec.name}:" if options.hosts else "-n "
            here = _place_on_host(local, facts.num_gpus, facts.num_cores, fewer)
            check_memory(len(here), facts.memory_bytes)
        except ValueError as error:
            raise ValueError(f"{host.spec.name}: {error}") from None
        places += [
            replace(
                each,
                local_world_size=len(here),
                host=host.spec.name,
                address=facts.address,
                host_rank=number,
                num_hosts=len(hosts.found),
            )
            for each in here
        ]
    return [
        replace(each, rank=rank, world_size=len(places))
        for rank, each in enumerate(places)
    ]
