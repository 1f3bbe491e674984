"""What `%dist_restart -n` and `--hosts` ask for: a running lab's ranks in other places.

Ranks are numbered as at a start: host by host, in the order in which `--hosts` names
them. A rank of the same number on the same host, with the same device, keeps its
process; all others are new ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from labkit.checks import UserError
from labkit.notebook.cluster.placement import StartOptions
from labkit.notebook.cluster.placement import check_num_ranks
from labkit.notebook.cluster.placement import place_on_found
from labkit.notebook.cluster.placement import place_ranks
from labkit.notebook.hosts.hosts import Hosts
from labkit.notebook.hosts.hosts import find_hosts
from labkit.notebook.hosts.hosts import parse_hosts
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.records import Placement


def place_anew(
    options: StartOptions,
    former: Sequence[Placement],
    hosts: Hosts | None,
    *,
    num_ranks: int | None,
    on_hosts: str | None,
) -> tuple[list[Placement], Hosts | None]:
    """Places for the ranks of a lab that was started with `options`, and is on `hosts`;
    `former` are those of today.

    Raises ValueError for what cannot be, and UserError for a host that is not as it has
    to be; nothing was started.
    """
    if num_ranks is not None:
        check_num_ranks("num_ranks", num_ranks)
    if on_hosts is not None:
        parse_hosts(on_hosts)
    if num_ranks is not None and on_hosts is not None:
        raise ValueError(
            f"-n {num_ranks} and --hosts {on_hosts}: --hosts says how many ranks each "
            "host has; leave -n out"
        )
    device, backend = former[0].device.split(":")[0], former[0].backend
    options = replace(
        options, num_ranks=num_ranks, hosts=on_hosts, device=device, backend=backend
    )
    if hosts is None:
        if num_ranks is None:
            raise ValueError(
                f"--hosts {on_hosts}: this lab is on one host, the notebook's own, "
                "where -n N changes the number of its ranks; for others run "
                f"%dist_stop, then %dist_start --launcher ssh --hosts {on_hosts}"
            )
        return _place_here(options), None
    launcher = _other(hosts.launcher, former, num_ranks, on_hosts)
    found = find_hosts(launcher, interface=options.interface, device=device)
    if found.own_address != hosts.own_address:
        raise UserError(
            f"the hosts would reach this one at {found.own_address}, and the lab "
            f"listens at {hosts.own_address}; name hosts on the lab's network, or "
            "run %dist_stop, then %dist_start on these hosts. Nothing was started"
        )
    return place_on_found(found, options), found


def _place_here(options: StartOptions) -> list[Placement]:
    try:
        return place_ranks(options)
    except ValueError as error:
        if "--backend" not in str(error):
            raise
        raise ValueError(
            f"{error}. For another backend or device %dist_stop the lab, and "
            "%dist_start one"
        ) from None


def _other(
    launcher: HostLauncher,
    former: Sequence[Placement],
    num_ranks: int | None,
    on_hosts: str | None,
) -> HostLauncher:
    """What starts programs on the hosts that are asked for."""
    if on_hosts is not None:
        return launcher.on_hosts(parse_hosts(on_hosts))
    assert num_ranks is not None
    names = [each.host for each in former]
    now = {name: names.count(name) for name in dict.fromkeys(names)}
    return launcher.for_ranks(num_ranks, now)
