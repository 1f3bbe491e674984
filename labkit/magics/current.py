"""The lab that the magics use: one at a time."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

from labkit.checks import UserError
from labkit.lab import Lab
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.hosts.hosts import parse_hosts
from labkit.notebook.keeper.kept_labs import waiting_labs
from labkit.options import check_values

if TYPE_CHECKING:
    from labkit.notebook.runs.run import Run
    from labkit.notebook.tuning.study import Study

WITH_HOSTS = ("ssh", "mpi")
"""The launchers whose ranks are on the hosts that `--hosts` names."""

_current: Lab | None = None


def current_lab() -> Lab:
    """Get the lab that the magics use.

    Returns
    -------
    Lab
        What `%dist_start` started.

    Raises
    ------
    RuntimeError
        Where none is running.
    """
    lab = running_lab()
    if lab is None:
        found = "no lab is running; %dist_start starts one"
        if kept := waiting_labs():
            found += "\n  ".join(["; %dist_attach attaches to a kept one:", *kept])
        raise UserError(found)
    return lab


def running_lab() -> Lab | None:
    """The magics' lab, or None where none is running."""
    return _current if _current is not None and _current.is_running else None


def tune(
    code_or_function: str | Callable[..., Any],
    space: Mapping[str, Any],
    **options: Any,
) -> "Study":
    """Find the best parameters on the lab that the magics use.

    Parameters
    ----------
    code_or_function, space, **options
        As for `Lab.tune`.

    Returns
    -------
    Study
        With `best_params`, `best_value`, `best_run`, `table` and `plot()`.

    Raises
    ------
    ValueError, RankError, CellTimeoutError
        As `Lab.tune`.
    RuntimeError
        Where no lab is running.

    Examples
    --------
    >>> labkit.tune(train, {"lr": (1e-4, 1e-1, "log")}, trials=30).best_params
    """
    return current_lab().tune(code_or_function, space, **options)


def own_runs() -> "list[Run]":
    """The runs of the magics' lab; none where none is running."""
    lab = running_lab()
    return [] if lab is None else lab.runs


def start_lab(
    options: StartOptions, *, on_progress: Callable[[str], None] = lambda text: None
) -> Lab:
    """The lab that the magics use: a new one, or that which runs if it is as asked for.

    Raises ValueError where another kind is running, and else as `Lab` and `Lab.check`
    do.
    """
    check_values(options)
    lab = running_lab()
    if lab is None:
        lab = Lab(**vars(options), on_progress=on_progress)
        set_current_lab(lab)
        return lab
    place = lab.placements[0]
    running = f"a lab of {lab.describe()} is running; run %dist_stop before you start "
    if options.num_ranks not in (None, lab.world_size):
        raise ValueError(
            f"{running}one with -n {options.num_ranks}"
            + other_size(lab, options.num_ranks)
        )
    is_other = options.backend not in ("auto", lab.backend)
    if is_other or options.device not in ("auto", lab.device):
        raise ValueError(f"{running}another kind")
    if options.hosts is not None:
        wanted = parse_hosts(options.hosts)
        ranks = Counter(each.host for each in lab.placements)
        if [each.name for each in wanted] != lab.hosts or any(
            each.num_ranks not in (None, ranks[each.name]) for each in wanted
        ):
            other = (
                f"; or %dist_restart --hosts {options.hosts} changes its hosts, and "
                "ranks that stay keep their variables"
            )
            can_move = lab.launcher in WITH_HOSTS and not lab.kept
            raise ValueError(f"{running}one on {options.hosts}{other * can_move}")
    if options.started_by not in ("local", lab.launcher):
        how = options.profile and f"--profile {options.profile}"
        raise ValueError(f"{running}one with {how or f'--launcher {options.launcher}'}")
    # A profile may start several engines on one host.
    if options.nodes not in (None, len(lab.hosts)) and options.profile is None:
        raise ValueError(f"{running}one with --nodes {options.nodes}")
    if options.keep not in (None, lab.kept and lab.kept[1]):
        raise ValueError(f"{running}one that is kept for {options.keep:g} min")
    if options.threads not in (None, place.num_threads):
        raise ValueError(
            f"a lab is running whose ranks have {place.num_threads} torch "
            f"thread{'s' * (place.num_threads != 1)} each; run %dist_stop before "
            f"you start one with --threads {options.threads}"
        )
    lab.check()
    return lab


def other_size(lab: Lab, num_ranks: int) -> str:
    """How a lab that is running gets another number of ranks; "" where it cannot."""
    if lab.kept:  # it has the ranks that it was started with
        return ""
    does = f"-n {num_ranks} changes the number of its ranks"
    if lab.launcher in WITH_HOSTS:
        there = Counter(each.host for each in lab.placements)
        now = ",".join(f"{name}:{number}" for name, number in there.items())
        does = f"--hosts HOST:N,HOST:N changes how many each host has, now {now}"
    return f"; or %dist_restart {does}, and ranks that stay keep their variables"


def attach_lab(
    name: str | None, *, on_progress: Callable[[str], None] = lambda text: None
) -> Lab:
    """The lab that the magics use from now on: one that was kept. As `Lab.attach`, and
    UserError where one is running."""
    if (lab := running_lab()) is not None:
        raise UserError(
            f"a lab of {lab.describe()} is running in this kernel; %dist_stop would "
            "end it, and %dist_attach is for a kernel that has none"
        )
    lab = Lab.attach(name, on_progress=on_progress)
    set_current_lab(lab)
    return lab


def set_current_lab(lab: Lab | None) -> None:
    """Make `lab` the one that the magics use."""
    global _current
    _current = lab
