"""How long labkit waits for what, in seconds, and which wait must outlast which.

A wait that is within another has to end first, or its own answer is never seen: the
outer one gives up, with a worse word on what is wrong. `ORDER` has these pairs, each
with its reason; a test holds the numbers to them. Refresh periods of pictures are not
waits, and stay with what they refresh.
"""

# ---- looks: how often a waiting loop sees what has happened ----

POLL_S = 0.05
"""At answers, ends and interrupts."""
QUICK_POLL_S = 0.02
"""At what others do in milliseconds: a stack, a part of a checkpoint."""
LOOK_S = 0.25
"""At the engines' processes, between cells; a death in mid-cell is noticed at once."""
LOOK_AGAIN_S = 0.75
"""At what seldom changes of them, such as the limits of their control groups, or is
reported, such as their end while the fork server lives."""

# ---- a lab: its processes and its group ----

START_S = 120.0
"""The fork server imports torch; then the engines start: each of the two."""
END_S = 10.0
"""A killed engine ends."""
REAP_S = 2.0
"""The exit code of an ended engine is known."""
REPORT_S = 1.0
"""The fork server reports it."""
FORK_S = 10.0
"""The fork server has forked an engine."""
OOM_KILL_S = 10.0
"""A process that the kernel killed for memory gives it back, and ends."""
RELEASE_S = 0.5
"""A rank waits for others in a group that is not complete, until it is released."""
ABORT_S = 4.0
"""A rank aborts its communicators, while it is asked to release a collective."""
LEAVE_S = 20.0
"""The same, before it joins another group; then it cannot, and is to be restarted."""
PROOF_S = 2.0
"""The all-reduce that shows whether a group works."""
GREETING_S = 1.0
"""Another rank that has connected says who it is."""
MOST_POLLED_S = 2e6
"""What the system can wait for a socket: its milliseconds have 31 bits."""
GROUP_S = 1800.0
"""A collective of the user's, by default: the process group's own timeout."""

# ---- other hosts ----

SSH_S = 60.0
"""A host says what it has, over ssh, say; it may import torch to count GPUs."""
CONNECT_S = 10.0
"""ssh has connected to it, or gives it up."""
REGISTER_S = 30.0
"""An agent that the controller has not answered by then does not reach it, and ends."""
END_HOST_S = 30.0
"""All of a lab has ended on a host: what tidies up has 20 s for that."""
LEAVE_HOST_S = 1.0
"""So long after all else of a lab has ended on a host, what has said so does."""
END_JOB_S = 30.0
"""salloc has given its job back; a busy controller of Slurm's may take its time."""
JOB_END_S = 60.0
"""So long before the end of a Slurm job a run that keeps checkpoints stops with one."""
SELDOM_S = 30.0
"""At a program on a host of a profile's that has printed nothing for as long."""
CUT_OFF_S = 3.0
"""Of a host that has not answered for so long, no rank is killed for not stopping."""
HEARTBEAT_S = 0.55
"""So long, at least, is it from one look of an agent, at whether it has heard from the
controller, to the next: the controller's period (`heartbeat_period`) and 0.5 s."""
BEAT_S = 0.4
"""From one heartbeat of the controller's to the next, where no engine registers: within
that look."""
UNHEARD_S = 22.5
"""An agent that has not heard from it for so long ends all of its lab; later where the
lab is kept without a kernel for longer."""
LOST_S = 15.0
"""Of a host that has not answered for so long, all ranks count as dead."""

# ---- questions to ranks, and calls of labkit's own ----

ANSWER_S = 5.0
"""A rank's control thread answers, also while a cell runs."""
STACK_S = 2.0
"""The same for its stack; one that has not by then holds the GIL in native code, and is
sent a signal that writes the stack."""
LOAD_S = 0.03
"""For so long it looks at its main thread, to see whether that computes or waits."""
DUMP_S = 0.3
"""It has written that."""
CALL_S = 60.0
"""A call that takes no time of its own: to install, to join a group, to find a name."""
ASK_S = 1.0
"""From an answer to the next question, during a call without a limit; and from one
question to the next which engines there are, while they start; and what is asked only
for a hint has to be known by then."""
SILENCE_S = 60.0
"""Such a call ends where its rank has answered no question for so long."""

# ---- stopping a cell ----

GRACE_S = 0.2
"""How long the others may run on after the first failure; a rank that failed at the
same line needs no interrupt, and the group then stays as it is."""
ALIKE_S = 1.0
"""How long the ranks of a run that is stopped have to end after the same step; then
they are interrupted wherever they are."""
STEP_S = 30.0
"""Every rank comes to the end of the step that `Run.stop` waits for; where one does
not, the run is interrupted."""
REPEAT_S = 0.5
"""A rank that answered, and has not stopped, is asked again after so long."""
ASK_AGAIN_S = 2.0
"""And one that did not even answer after so long."""
SIGNAL_AGAIN_S = 3.0
"""A cell that saw an interrupt, and continues, is interrupted again."""
IMPORT_S = 5.0
"""An import ends, and only then its cell is interrupted: a module that was imported in
part stays broken."""
SECOND_AFTER_S = 2.5
AGAIN_S = 0.5
"""A second interrupt kills what runs `AGAIN_S` later, and not before `SECOND_AFTER_S`
from the first one: a key may be pressed twice, and a rank about to end by itself."""
STILL_RUNS_S = 5.0
"""Ranks that still run so long after the first request are reported."""
KILL_AFTER_S = 30.0
"""A rank that still runs so long after the first request is killed."""
FORECAST_S = 10.0
"""A rank that ran out of memory works out what would fit."""
HOLD_S = 10.0
"""A rank that holds before a step is sent the step to stop after."""
OUTCOME_AFTER_S = 10.0
"""The outcome of a cell comes, after the rank is done with it."""
END_RUN_S = 4.0
"""A run in the background ends well, before `Lab.stop` ends its ranks."""

EMPTY_AFTER_S = 3.0
"""A run that has taken no step by then shows a picture without curves: it runs."""
CATCH_UP_S = 2.0
"""The picture of now is shown before the user is asked something."""
LAST_PICTURE_S = 10.0
"""The render process draws the last picture of a run; then the kernel does."""

# ---- a cell that hangs ----

HANG_AFTER_S = 30.0
"""Nothing has happened in a cell: a note says where its ranks are."""
PROGRESS_S = 5.0
"""While nothing comes from its ranks, they are asked how far they are, so often."""

# ---- a step that is measured ----

GIVE_UP_S = 2.0
"""The least after which a step that does not end is not measured any more."""

# ---- output ----

PIECE_S = 0.0001
"""From one look whether what other programs have printed is written, to the next."""
PRINT_S = 1.0
"""A single print of a rank that has printed more than the notebook shows."""
FOLD_S = 0.5
"""A line that one rank printed is held back: others may print the same."""

ORDER = [
    ("LOOK_AGAIN_S", "REAP_S", "an end that nobody reports is found by then"),
    ("REPORT_S", "REAP_S", "the exit code that the fork server reports is waited for"),
    ("CONNECT_S", "SSH_S", "ssh itself says that it cannot connect"),
    ("ASK_S", "CUT_OFF_S", "one answer that is late is no silence"),
    ("CUT_OFF_S", "LOST_S", "a link may be down for some seconds"),
    ("ANSWER_S", "LOST_S", "a host that is slow is not lost"),
    ("BEAT_S", "HEARTBEAT_S", "an agent that looks has heard from the controller"),
    ("LOST_S", "UNHEARD_S", "a host that comes back in time has all of its ranks"),
    ("POLL_S", "GRACE_S", "ranks that fail at the same line are seen within the grace"),
    ("GRACE_S", "REPEAT_S", "what stops by itself is not asked twice"),
    ("ALIKE_S", "SECOND_AFTER_S", "a second interrupt is not needed to stop a run"),
    ("REPEAT_S", "ASK_AGAIN_S", "no answer may mean that one is on its way"),
    ("REPEAT_S", "SIGNAL_AGAIN_S", "a cell that stops by itself sees one interrupt"),
    ("SIGNAL_AGAIN_S", "KILL_AFTER_S", "a cell may swallow one interrupt, and live"),
    ("IMPORT_S", "KILL_AFTER_S", "a rank is not killed for an import of some seconds"),
    ("ASK_AGAIN_S", "SECOND_AFTER_S", "a rank is asked twice before a key kills it"),
    ("SECOND_AFTER_S", "KILL_AFTER_S", "a second interrupt is for the impatient"),
    ("SIGNAL_AGAIN_S", "STILL_RUNS_S", "what swallows one interrupt is not reported"),
    ("SECOND_AFTER_S", "STILL_RUNS_S", "the report says that a second one kills"),
    ("STILL_RUNS_S", "KILL_AFTER_S", "that a rank will be killed is said before"),
    ("FORECAST_S", "KILL_AFTER_S", "a rank is not killed while it writes its report"),
    ("HOLD_S", "KILL_AFTER_S", "a rank that holds is not taken for one that hangs"),
    ("ANSWER_S", "HOLD_S", "all ranks have said their step while the first one holds"),
    ("LOAD_S", "STACK_S", "a look at the main thread is a part of the answer"),
    ("DUMP_S", "STACK_S", "a stack that was dumped is there with those that came"),
    ("STACK_S", "HANG_AFTER_S", "stacks are there before the next note is due"),
    ("PROGRESS_S", "HANG_AFTER_S", "ranks that get on are heard before a note"),
    ("HANG_AFTER_S", "GROUP_S", "the note comes before the collective gives up"),
    ("RELEASE_S", "ANSWER_S", "a rank that is released is waited for"),
    ("ABORT_S", "ANSWER_S", "a rank that aborts answers all the same"),
    ("LEAVE_S", "CALL_S", "a rank itself says that it cannot leave its group"),
    ("PROOF_S", "CALL_S", "that a group is of no use is an answer, and no error"),
    ("ASK_S", "SILENCE_S", "a rank is silent only where it was asked"),
    ("ANSWER_S", "SILENCE_S", "a rank that is slow is not silent"),
]
"""(shorter, longer, why)"""
