"""The engines of a kept lab, for the kernel that is attached to it."""

import os
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipyparallel

from labkit import timeouts
from labkit.checks import UserError
from labkit.compat import ipyparallel as compat
from labkit.key_server import Meeting
from labkit.notebook.cluster.engines import LabEngines
from labkit.notebook.hosts.remote import RemoteEngine
from labkit.notebook.keeper.attachment import Answer
from labkit.notebook.keeper.attachment import Attachment
from labkit.notebook.keeper.lines import heard_meeting
from labkit.notebook.kernel import interrupts
from labkit.notebook.kernel.output import working_directory


class KeptCluster(LabEngines):
    """Cells and questions go to the ranks directly, all else to the lab's keeper."""

    def __init__(self, attachment: Attachment, told: dict[str, Any]) -> None:
        """`told` is what the keeper says of the engines."""
        super().__init__()
        self.folder = Path(told["folder"])
        self._attachment = attachment
        self._is_local = bool(told["is_local"])
        self._num_stores = 0
        if not self.lost_reason():
            self._client = ipyparallel.Client(
                told["connection_file"], profile_dir=told["folder"]
            )
            compat.keep_listening(self._client)
        self._know(told["engines"])

    def _know(self, engines: Sequence[Any]) -> None:
        for rank, engine_id, host, pid, stack_file in engines:
            asked = EnginesOfHost(host, self._attachment)
            engine = RemoteEngine(asked, pid, stack_file)
            self._engines[rank], self._engine_ids[rank] = engine, engine_id
            self._attachment.know(engine)

    def lost_reason(self) -> str:
        return self._attachment.unreachable

    def start_engines(
        self, ranks: Sequence[int], *, on_progress: Callable[[str], None]
    ) -> None:
        call = self._attachment.call
        self._know(
            call(
                "start_engines",
                ranks=list(ranks),
                **surroundings(),
                on_progress=on_progress,
            )
        )
        self.wait_for_client()

    def wait_for_client(self) -> None:
        """Until this kernel's client knows all engines that are alive."""
        ask_at = deadline = time.monotonic()
        deadline += timeouts.START_S
        while any(
            self._engines[rank].is_alive
            and self._engine_ids[rank] not in self._client.ids
            for rank in self.ranks
        ):
            interrupts.check()
            if reason := self.unreachable_reason():
                raise UserError(reason)
            if time.monotonic() > deadline:
                raise UserError("the controller does not tell of all of its engines")
            if time.monotonic() > ask_at:
                compat.ask_for_engines(self._client)
                ask_at = time.monotonic() + timeouts.ASK_S
            time.sleep(timeouts.QUICK_POLL_S)

    def end_engines(self, ranks: Sequence[int]) -> None:
        self._attachment.call("end_engines", ranks=list(ranks))

    def open_store(self) -> Meeting:
        return KeptStore(self._attachment, 0).open()

    def new_store(self) -> "KeptStore":
        self._num_stores += 1
        return KeptStore(self._attachment, self._num_stores)

    def free_port(self, rank: int) -> int:
        return int(self._attachment.call("free_port", rank=rank))

    @property
    def is_local(self) -> bool:
        return self._is_local

    @property
    def ends_at(self) -> float | None:
        found: float | None = self._attachment.call("ends_at")
        return found

    def hosts_without(self, folder: Path) -> list[str]:
        return list(self._attachment.call("hosts_without", folder=str(folder)))

    def leave(self) -> None:
        """Let the lab be as it is."""
        self._is_ending.set()
        self._on_late_output = lambda rank, kind, content: None
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None

    def stop(self) -> None:
        self.leave()
        try:
            self._attachment.call("stop")
        except UserError:
            if not self._attachment.is_closed:  # its end is that of the ranks
                raise


class KeptStore:
    """Where a group of a kept lab meets: the keeper serves it."""

    def __init__(self, attachment: Attachment, number: int) -> None:
        self._attachment = attachment
        self._number = number
        self._is_open = False

    def open(self) -> Meeting:
        """Have an empty store served, in place of the former one."""
        self._is_open = True
        return heard_meeting(self._attachment.call("open_store", number=self._number))

    def close(self) -> None:
        """Have none served."""
        if self._is_open:
            self._attachment.ask("close_store", number=self._number)


def surroundings() -> dict[str, Any]:
    """What ranks inherit of this kernel that are started now, as the keeper takes it:
    its working directory and its environment."""
    return {"directory": working_directory(), "variables": dict(os.environ)}


class EnginesOfHost:
    """What a keeper answers about the engines of one host."""

    def __init__(self, name: str, attachment: Attachment) -> None:
        self.name = name
        self._attachment = attachment

    @property
    def is_cut_off(self) -> bool:
        """As the keeper has said last."""
        return self.name in self._attachment.cut_off

    def ask(self, question: str, **arguments: Any) -> Answer:
        """As `labkit.host.agent.about_engines` has it."""
        return self._attachment.ask(question, host=self.name, **arguments)

    def answer(self, question: str, **arguments: Any) -> Any:
        """The same, waited for."""
        try:
            return self.ask(question, **arguments).result(timeouts.LOST_S)
        except TimeoutError as error:
            raise UserError("the keeper of the lab does not answer") from error
