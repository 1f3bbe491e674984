"""`with profile():` in a training cell: records what is in the block."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator

from labkit.checks import UserError
from labkit.rank.profiling.recorder import Recorder

KEPT = "of {number} blocks the last one is kept: a run has one profile"
KEPT_OF_BOTH = (
    "--profile and profile() have both recorded, and what was recorded last is kept: a "
    "run has one profile"
)


class BlockProfile:
    """What a training cell has as `profile`."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        num_steps: Callable[[], int],
        meet: Callable[[], object],
    ) -> None:
        """`num_steps()` the run has taken; `meet()` waits for the other ranks."""
        self._recorder = recorder
        self._num_blocks = 0
        self._num_steps = num_steps
        self._meet = meet

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Record what this block does, as one step. Collective: all ranks enter it.

        `Run.profile` has it afterwards: the last block, and not earlier ones.
        """
        recorder = self._recorder
        if recorder.folder is None:
            raise UserError(
                "profile() keeps what it records in the run's folder, and this run has "
                "none on disk; set LABKIT_RUNS to a folder that can be written to"
            )
        if not recorder.start():
            raise UserError(
                "profile(): a profiler is active in this process already (--profile, "
                "or one of the cell's own), and there can be one at a time; leave out "
                "one of the two"
            )
        try:
            self._meet()  # ranks are not ready at the same time
            recorder.begin_step(self._num_steps() + 1)
            yield
            recorder.finish()
            self._num_blocks += 1
        finally:
            if recorder.is_recording:
                recorder.stop()

    def end(self) -> None:
        """The run ends: say what was recorded and is not kept."""
        if self._recorder.num_written > self._num_blocks > 0:
            self._recorder.note(KEPT_OF_BOTH)
        elif self._num_blocks > 1:
            self._recorder.note(KEPT.format(number=self._num_blocks))
