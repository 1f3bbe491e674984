"""Programs on the hosts of a Slurm job: the one around this process, or its own."""

import contextlib
import copy
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

from labkit import timeouts
from labkit.checks import UserError
from labkit.notebook.hosts.launcher import HostLauncher
from labkit.notebook.hosts.launcher import HostSpec
from labkit.notebook.hosts.launcher import check_spread
from labkit.notebook.hosts.launcher import fewer
from labkit.notebook.hosts.launcher import has_let_go
from labkit.notebook.hosts.launcher import last_line
from labkit.notebook.hosts.launcher import output_of
from labkit.notebook.hosts.launcher import spread
from labkit.notebook.hosts.launcher import written
from labkit.notebook.kernel import interrupts

_MARK = "labkit-job:"
_TELL = (
    f'echo {_MARK} "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST" '
    '"${SLURM_NTASKS:+$SLURM_TASKS_PER_NODE}"; exec sleep infinity'
)
"""What runs in an allocation of labkit's own: for as long as salloc lives."""
_HOLD = (
    '"$@" < /dev/null & salloc=$!; exec 3<&0; '
    "(read -r _ <&3; kill $salloc) 2> /dev/null & reader=$!; "
    "wait $salloc; code=$?; kill $reader 2> /dev/null; exit $code"
)
"""salloc, ended by a line or the end of the pipe to this, also while it waits: so that
a notebook that is killed leaves no job."""
_SAID = {
    "DUE TO TIME LIMIT": "has reached its time limit",
    "DUE TO PREEMPTION": "was preempted",
    "DUE TO JOB REQUEUE": "was requeued",
}
"""What slurmstepd prints as it ends a step, before the job's state is final."""
_OVER = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "has reached its time limit",
    "NODE_FAIL": "has lost a node",
    "PREEMPTED": "was preempted",
    "REQUEUED": "was requeued",
}
"""What the states of a job that has ended mean."""
_NEVER = {
    *("BadConstraints", "InvalidAccount", "InvalidQOS"),
    *("PartitionNodeLimit", "PartitionTimeLimit"),
}
"""Reasons for which a job waits that no other job's end changes."""
_ENDED = {"COMPLETED", "FAILED", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL"}


@dataclass(frozen=True)
class Job:
    """A job, as Slurm's variables have it."""

    number: str
    nodes: str
    """As "node[1-2]"."""
    tasks_per_node: str
    """As "2(x2),1"; "" where nobody asked for tasks."""


class Slurm(HostLauncher):
    """`srun` starts one process on each host of a job."""

    def __init__(
        self,
        *,
        num_ranks: int | None,
        num_hosts: int | None,
        options: Sequence[str],
        on_progress: Callable[[str], None],
    ) -> None:
        """Outside of a job it waits for one of its own, with `options` of salloc's."""
        for program in ("srun", "salloc", "scontrol"):
            if shutil.which(program) is None:
                raise UserError(
                    f"no {program} on the PATH; load Slurm's module, or run the "
                    "notebook on a host that has Slurm, or use --launcher ssh"
                )
        super().__init__([])
        self._holder: subprocess.Popen[str] | None = None
        self._own_job = ""
        """The number of the job that was asked for here; "" for none."""
        self._reason, self._ask_at = "", time.monotonic() + timeouts.ASK_S
        around = job_around(os.environ)
        if around is not None and options:
            raise ValueError(
                f"--launcher-options {' '.join(options)}: options of salloc have no "
                f"effect inside a job, and this notebook runs in Slurm job "
                f"{around.number}; leave them out, or, for another job, first delete "
                "the SLURM_* variables from os.environ, all but SLURM_CONF"
            )
        if num_ranks is not None and num_hosts is not None:
            check_spread(num_ranks, num_hosts)
        if "SLURM_HET_SIZE" in os.environ:
            raise UserError(
                "this notebook runs in a heterogeneous Slurm job, which --launcher "
                "slurm does not know; name its hosts: --launcher ssh --hosts HOST:N"
            )
        self._job = around or self._allocate(num_ranks, num_hosts, options, on_progress)
        try:
            self.specs = self._place(num_ranks, num_hosts)
            self._num_hosts = len(self.specs)
            self._gres = self._gres_by_host()
        except BaseException:
            self.close()
            raise

    def _allocate(
        self,
        num_ranks: int | None,
        num_hosts: int | None,
        options: Sequence[str],
        on_progress: Callable[[str], None],
    ) -> Job:
        wanted = [] if num_ranks is None else [f"--ntasks={num_ranks}"]
        if num_hosts is not None or num_ranks is None:
            wanted.append(f"--nodes={num_hosts or 1}")
        # Ranks on the hosts that are left keep their variables when one fails.
        command = ["salloc", "--job-name=labkit", "--no-kill", "--wait-all-nodes=1"]
        command += ["--kill-command=TERM", *wanted, *options]
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as log:
            self._holder = subprocess.Popen(
                ["sh", "-c", _HOLD, "sh", *command, "sh", "-c", _TELL],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=log,
                text=True,
                start_new_session=True,  # the user's Ctrl-C is the notebook's
            )
            try:
                while True:
                    interrupts.check()
                    has_ended = self._holder.poll() is not None
                    told = written(said)
                    found = re.search(rf"(?m)^{_MARK} (\S+) (\S+) (\S*)$", told)
                    if found:
                        self._own_job = found[1]
                        return Job(found[1], found[2], found[3])
                    words = written(log)
                    if asked := re.search(r"job (?:allocation )?(\d+)", words):
                        self._own_job = asked[1]
                    last = last_line(words)
                    last = last.removeprefix("salloc: ").removeprefix("error: ")
                    reason = self._waits_for()
                    # In one of several partitions it may start all the same.
                    is_hopeless = reason in _NEVER and "," not in " ".join(options)
                    if has_ended or is_hopeless:
                        why = f"{reason}, so Slurm would not start it" * is_hopeless
                        raise UserError(
                            f"salloc got no job: {why or last or 'it said nothing'}; "
                            "--launcher-options takes options of salloc, for example "
                            '--launcher-options "--partition=NAME --time=1:00:00"'
                        )
                    state = f"{last} ({reason})" if reason else last
                    on_progress(f"Slurm: {state or 'asking for a job'}")
                    time.sleep(timeouts.POLL_S)
            except BaseException:
                self.close()
                raise

    def _waits_for(self) -> str:
        """Why Slurm has not started the job yet, in its own word; "" where it has not
        said. It is asked every few seconds."""
        if self._own_job and time.monotonic() > self._ask_at:
            self._ask_at = time.monotonic() + timeouts.PROGRESS_S
            asked = ["squeue", "--noheader", "--format=%r", f"--jobs={self._own_job}"]
            with contextlib.suppress(UserError):  # it has just ended
                reason = output_of(asked).strip()
                self._reason = "" if reason == "None" else reason
        return self._reason

    def _place(self, num_ranks: int | None, num_hosts: int | None) -> list[HostSpec]:
        """The hosts of the job that are used, and the ranks of each."""
        listed = ["scontrol", "show", "hostnames", self._job.nodes]
        names = output_of(listed).split()
        if num_hosts is not None and num_hosts > len(names):
            raise ValueError(
                f"--nodes {num_hosts}: Slurm job {self._job.number} has {len(names)} "
                f"hosts ({self._job.nodes}); use --nodes {len(names)} at most"
            )
        tasks = tasks_of(self._job.tasks_per_node)
        if len(tasks) != len(names) or num_hosts not in (None, len(names)):
            tasks = []
        names = names[:num_hosts]
        if num_ranks is not None and sum(tasks) != num_ranks:
            if num_ranks < len(names):
                raise ValueError(
                    f"-n {num_ranks}: fewer ranks than the {len(names)} hosts; name "
                    f"fewer with --nodes {num_ranks}"
                )
            return spread(num_ranks, names)
        return [
            HostSpec(name, tasks[number] if tasks else None)
            for number, name in enumerate(names)
        ]

    def on_hosts(self, specs: Sequence[HostSpec]) -> "Slurm":
        raise ValueError(
            f"--hosts: Slurm job {self._job.number} says which hosts there are "
            f"({self._job.nodes}), and they stay; %dist_restart -n N changes the "
            "number of ranks on them, and %dist_stop, then %dist_start, uses another "
            "job"
        )

    def for_ranks(self, num_ranks: int, now: Mapping[str, int]) -> "Slurm":
        """Fewer ranks leave the last hosts first; more are spread over all hosts that
        the lab was started on."""
        most = sum(tasks_of(self._job.tasks_per_node))
        if most and num_ranks > most:
            raise ValueError(
                f"-n {num_ranks}: Slurm job {self._job.number} is for {most} tasks, on "
                f"{self._job.nodes}; use -n {most} at most, or %dist_stop this lab and "
                "start one in a larger job"
            )
        other = copy.copy(self)
        if num_ranks > sum(now.values()):
            num_hosts = min(num_ranks, self._num_hosts)
            other.specs = self._place(num_ranks, num_hosts)
            return other
        other.specs = fewer(num_ranks, now)
        return other

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        # Variables of the job, and of a step of it, are options of srun.
        prefixes = ("SLURM_", "SRUN_")
        names = [e for e in os.environ if e.startswith(prefixes) and e != "SLURM_CONF"]
        without = [word for name in names for word in ("-u", name)]
        # It shares all that the job has with what else runs in it, as a notebook.
        step = ["--overlap", "--cpu-bind=none", "--mpi=none"]
        if host in self._gres:  # a step has by itself what the job asked for a task
            step.append(f"--gres={self._gres[host] or 'none'}")
        one = ["--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        srun = ["srun", f"--jobid={self._job.number}", *step, *one]
        return ["env", *without, *srun, *words]

    def address(self, host: str) -> str:
        return self._ask("node", host).get("NodeAddr", host)

    def cannot_reach(self, host: str, code: int, errors: str) -> str:
        last = last_line(errors)
        return f"srun cannot start a program there ({last})" if "srun:" in last else ""

    def why_gone(self, said: str = "") -> str:
        for words, what in _SAID.items():
            if words in said:
                return f"Slurm job {self._job.number} {what}"
        try:
            job = self._ask("job", self._job.number)
        except UserError as error:
            # Slurm forgets a job some minutes after its end; a controller of Slurm's
            # that does not answer for a while has ended nothing.
            if "Invalid job id" in str(error):
                return f"Slurm job {self._job.number} has ended"
            return ""
        state = job.get("JobState", "")
        if state == "COMPLETING":  # it is being ended, and this hides its state
            state = "TIMEOUT" if job.get("Reason") == "TimeLimit" else "CANCELLED"
        if state in _OVER:
            return f"Slurm job {self._job.number} {_OVER[state]}"
        if state in _ENDED:
            return f"Slurm job {self._job.number} has ended ({state})"
        return ""

    @property
    def ends_at(self) -> float | None:
        with contextlib.suppress(UserError):
            end = self._ask("job", self._job.number).get("EndTime", "")
            return float(end) if end.isdecimal() else None
        return None

    def close(self) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        if has_let_go(holder):
            return
        if self._own_job:
            with contextlib.suppress(UserError):
                output_of(["scancel", self._own_job])
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()

    def _ask(self, what: str, name: str) -> dict[str, str]:
        """What `scontrol show` says of it, by field; times are since the epoch."""
        asked = ["scontrol", "--oneliner", "--details", "show", what, name]
        told = output_of(["env", "SLURM_TIME_FORMAT=%s", *asked])
        # Of an array or a heterogeneous job it says all parts, a line each.
        for line in told.splitlines():
            if what != "job" or f"JobId={name} " in line:
                return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        return {}

    def _gres_by_host(self) -> dict[str, str]:
        """What each host's part of the job has besides cores, as --gres takes it."""
        asked = ["scontrol", "--oneliner", "--details", "show", "job"]
        told = output_of([*asked, self._job.number])
        found = {}
        for nodes, gres in re.findall(
            r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", told
        ):
            for name in output_of(["scontrol", "show", "hostnames", nodes]).split():
                found[name] = re.sub(r"\([^)]*\)", "", gres)
        return found


def job_around(environment: Mapping[str, str]) -> Job | None:
    """The job that this process runs in; None outside of one."""
    number = environment.get("SLURM_JOB_ID")
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not number or not nodes:
        return None
    # Without tasks asked for, Slurm has one for each core; in a step, as that of
    # `srun --pty`, they are the step's.
    tasks = environment.get("SLURM_TASKS_PER_NODE", "")
    is_step = tasks == environment.get("SLURM_STEP_TASKS_PER_NODE")
    asked = "SLURM_NTASKS" in environment and not is_step
    return Job(number, nodes, tasks * asked)


def tasks_of(text: str) -> list[int]:
    """The numbers that Slurm writes as "2(x2),1"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)
    return [int(num) for num, times in found for _ in range(int(times or 1))]
