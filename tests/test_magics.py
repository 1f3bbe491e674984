"""The magics through a real kernel: what a user of a notebook sees."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import Kernel
from kernels import running_kernel

from labkit.magics.lab_magics import OF_EVERY_TRIAL
from labkit.magics.lab_magics import LabMagics
from labkit.notebook.execution.errors import Interrupted
from labkit.notebook.tuning.options import check_run_options

pytestmark = pytest.mark.timeout(120)

LOOP = """%%dist_train ddp {options}
import torch.nn.functional as F
from labkit.data import digits
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
fit(model, digits(), F.cross_entropy, batch_size=64, epochs={epochs},
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""

PAINTER = (
    "from labkit.notebook.live.render_process import painter; "
    "print(painter()._process.pid)"
)


def usage_error(kernel: Kernel, code: str) -> str:
    """The one line that a wrong magic line gives."""
    reply = kernel.run(code)
    assert reply.status == "error"
    assert reply.stderr.startswith("UsageError: ")
    return reply.stderr


def test_an_interrupted_magic_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.testing.globalipapp import get_ipython

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("labkit.magics.lab_magics.current_lab", interrupted)
    with pytest.raises(Interrupted) as caught:
        LabMagics(get_ipython()).dist_status("")
    said = "%dist_status was interrupted; no lab is running"
    assert caught.value._render_traceback_() == [said]


@pytest.mark.long
def test_start_says_ready_when_it_is(kernel: Kernel) -> None:
    reply = kernel.run("%dist_start -n 2")  # again: the same lab
    assert reply.stdout == (
        "Ready: 2 ranks on the CPU, gloo; every rank answered, and one all-reduce "
        "was right.\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "%dist_start -n 3",
            "a lab of 2 ranks on the CPU, gloo is running; run %dist_stop",
        ),
        ("%dist_start --backend nccl", "is running; run %dist_stop before"),
        ("%dist_start --threads 4", "whose ranks have 1 torch thread each; run %"),
        ("%dist_start -n zero", "'zero'; it takes a whole number: --num-ranks N; "),
        ("%dist_start --keep forever", "'forever'; it takes a number: --keep MINUTES"),
        ("%dist_start --keep", "before you start one that is kept for 30 min\n"),
        ("%dist_start --keep 0", "--keep 0: give the minutes without a kernel, more"),
        ("%dist_start --keep -1", "--keep -1: give the minutes without a kernel, more"),
        ("%dist_start --keep nan", "--keep nan: give the minutes without a kernel,"),
        ("%dist_start --keep 0.5h", "argument --keep: invalid float value: '0.5h'"),
        ("%dist_start --keep 1000000000", "--keep 1000000000: give the minutes with"),
        ("%dist_start --host node1:1", "--host node1:1 (did you mean --hosts?); "),
        ("%dist_start --backend mpi", "invalid choice: 'mpi'"),
        ("%dist_start --launcher pbs", "invalid choice: 'pbs'"),
        ("%dist_start --launcher slurm", "start one with --launcher slurm"),
        ("%dist_start --nodes 2", "start one with --nodes 2"),
        ("%dist_start --hosts node1:2", "before you start one on node1:2\n"),
        ("%dist_start --hosts node1:1, node2:1", "start one on node1:1,node2:1"),
        ('%dist_start --hosts "node1:1, node2:1"', "start one on node1:1, node2:1"),
        ("%%dist 2\n1", "this lab has the ranks 0, 1"),
        ("%%dist 0, 2\n1", "this lab has the ranks 0, 1"),
        ("%%dist one\n1", "write 0, or 0,2, or 1-3, or all"),
        ("%%dist --timeout 0\n1", "must be a number of seconds greater than 0; le"),
        ("%%dist_train\n1", "arguments are required: STRATEGY; STRATEGY: one of: sin"),
        ("%dist_import", "the following arguments are required: SCRIPT;"),
        ("%%dist_train zero7\n1", "choose one of: single, ddp, zero1, zero2, zero3"),
        ("%%dist_train ddp work\n1", "one word too many"),
        ("%%dist_train ddp --offload x\n1", "unrecognized arguments"),
        ("%%dist_train ddp --acc 4\n1", "--acc 4 (did you mean --accumulate?); "),
        ("%%dist_train ddp --grad-clip 1\n1", "(did you mean --clip?); %dist_train? "),
        (
            '%%dist_train ddp --comm topk --config {"topk": 0.1} --seed 1\n1',
            '--config takes the name of a dict, not the dict: write config = {"topk": '
            "0.1} in a cell of the notebook, then --config config",
        ),
        ("%%dist_train ddp --epochs 3\n1", "--epochs 3: the code that trains sets ep"),
        ("%%dist_train ddp -n 2\n1", "-n 2: %dist_start -n N starts the ranks"),
        ("%%dist_train --strategy ddp\n1", "a word of its own, as in %%dist_train ddp"),
        (
            "%dist_start 3",
            "unrecognized arguments: 3 (did you mean -n 3?); %dist_start?",
        ),
        ("%dist_start --num 3", "--num 3 (did you mean --num-ranks?); "),
        ("%%dist 0 1\n1", "%%dist takes RANKS (0, or 0,2, or 1-3; all ranks by"),
        ("%%dist_train ddp --save-every 9\n1", "mean --average-every or --every?); "),
        ("%%dist_train ddp --seed x\n1", "invalid int value"),
        ("%%dist_train ddp --live movie\n1", "invalid choice: 'movie'"),
        ("%dist_train ddp", "takes a strategy and a function"),
        ("%dist_train ddp nothing", "the notebook has no function 'nothing'"),
        ("%dist_train ddp f()", "no function 'f()'; write its name alone: f"),
        ("%dist_train f ddp", "unknown strategy 'f'; choose one of: single,"),
        ("%dist_push nothing", "the notebook has no variable 'nothing'"),
        ("%%dist_tune ddp --space lr=1..2\n1", "'lr=1..2'; assign the value to one in"),
        ("%dist_pull nothing", "no variable 'nothing'"),
        ("%dist_pull x --rank 0 --all", "--all and --rank: choose one"),
        ("%dist_pull x --rank 9", "this lab has the ranks 0, 1"),
        ("# first\n%%dist\n1", "%%dist has to be the first line of its cell; move"),
        ("\n\nx = 1\n%%dist_train ddp\n1", "%%dist_train has to be the first line"),
    ],
)
def test_a_wrong_line_is_explained_and_changes_nothing(
    kernel: Kernel, line: str, message: str
) -> None:
    before = kernel.run("import labkit; len(labkit.current_lab().runs)").result
    assert message in usage_error(kernel, line)
    after = kernel.run("import labkit; len(labkit.current_lab().runs)").result
    assert before == after


@pytest.mark.parametrize(
    "magic", ["%%dist\n1", "%dist_status", "%%dist_train ddp\n1", "%dist_pull x"]
)
def test_without_a_lab_a_magic_says_how_to_start_one(magic: str) -> None:
    from IPython.testing.globalipapp import get_ipython

    shell = get_ipython()
    shell.run_line_magic("load_ext", "labkit")
    result = shell.run_cell(magic)
    said = str(result.error_in_exec)  # and that whoever runs this has kept a lab
    assert said.startswith("no lab is running; %dist_start starts one")


def test_every_magic_and_option_has_help() -> None:
    names = {**LabMagics.magics["line"], **LabMagics.magics["cell"]}.values()
    assert len(names) == 17
    for name in names:
        magic = getattr(LabMagics, name)
        assert magic.__doc__.strip(), name
        assert all(action.help for action in magic.parser._actions), name
        cut = [line for line in magic.__doc__.splitlines() if line.endswith("-")]
        assert cut == [], "an option is cut in two: it cannot be copied"


def test_tune_has_no_option_that_a_study_refuses() -> None:
    check_run_options(dict.fromkeys(OF_EVERY_TRIAL))


def test_help_is_shown_and_nothing_runs(kernel: Kernel) -> None:
    reply = kernel.run("%%dist_train ddp --help\n1 / 0")
    assert reply.status == "ok", reply.stderr
    for action in LabMagics.dist_train.parser._actions:
        assert (action.option_strings or [action.metavar])[0] in reply.stdout
    assert "%dist_status" in kernel.run("%dist_status --help").stdout


def test_a_cell_prints_by_rank(kernel: Kernel) -> None:
    reply = kernel.run("%%dist\nprint('hello from', rank)\nworld_size")
    assert reply.stdout == (
        "[rank 0] hello from 0\n[rank 1] hello from 1\n[ranks 0-1] 2\n"
    )


def test_figures_of_ranks_come_through(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%dist 1\nimport matplotlib.pyplot as plt\nplt.plot([1, rank]);"
    )
    assert "[rank 1]" in reply.stdout
    assert [set(data) for data in reply.displays] == [{"image/png", "text/plain"}]


def test_rich_results_come_through_once_if_equal(kernel: Kernel) -> None:
    code = "%%dist\nfrom IPython.display import HTML\nHTML('<b>both</b>')"
    reply = kernel.run(code)
    assert [data["text/html"] for data in reply.displays] == ["<b>both</b>"]
    assert reply.stdout == "[ranks 0-1]\n"


def test_a_cell_without_a_magic_runs_in_the_notebook(kernel: Kernel) -> None:
    kernel.run("%%dist\ntheirs = 1")
    for name in "rank", "theirs":
        reply = kernel.run(name)
        assert reply.error["ename"] == "NameError"
        assert f"the ranks have {name}" in reply.stderr
        can_pull = f"%dist_pull {name} copies a value" in reply.stderr
        assert can_pull == (name == "theirs")  # rank differs, and labkit sets it
    hint = "fit belongs to a training cell: %%dist_train STRATEGY at the top"
    assert hint in kernel.run("fit(model)").stderr
    assert kernel.run("nothing_such").stderr == ""
    library = "import types; made = types.ModuleType('made')\n"
    assert kernel.run(f"{library}exec('rank', made.__dict__)").stderr == ""


def test_a_name_of_the_ranks_is_explained_before_their_first_cell(
    kernel: Kernel,
) -> None:
    kernel.run("%dist_restart --all")
    assert "the ranks have rank" in kernel.run("print(rank)").stderr
    assert "prepare belongs to a training cell" in kernel.run("prepare()").stderr


def test_push_and_pull_by_name(kernel: Kernel) -> None:
    kernel.run("rate = 0.25\ndef double(x):\n    return 2 * x")
    assert kernel.run("%dist_push rate double").status == "ok"
    kernel.run("%%dist\ndoubled = double(rate) + rank")
    kernel.run("%dist_pull doubled --all")
    assert kernel.run("doubled").result["text/plain"] == "[0.5, 1.5]"
    kernel.run("%dist_pull doubled --rank 1")
    assert kernel.run("doubled").result["text/plain"] == "1.5"
    kernel.run("one, two = 1, 2\n%dist_push one, two\ndel one, two")
    kernel.run("%dist_pull two, one --all")
    assert kernel.run("one, two").result["text/plain"] == "([1, 1], [2, 2])"
    kernel.run("%dist_pull one nothing_such")
    assert kernel.run("one").result["text/plain"] == "[1, 1]"


def test_a_comment_after_a_magic_is_no_argument(kernel: Kernel) -> None:
    assert kernel.run("%%dist 1  # it's here\nprint(rank)").stdout == "[rank 1] 1\n"
    assert kernel.run("%dist_start -n 2  # again, --help").stdout.startswith("Ready")


def test_a_name_that_only_the_notebook_has_is_explained(kernel: Kernel) -> None:
    kernel.run("import shelve\nmine = 1\ndef use():\n    return mine + later")
    for code, hint in {
        "mine": "%dist_push mine copies it to them",
        "shelve": "write that import into a %%dist cell too",
    }.items():
        reply = kernel.run(f"%%dist\n{code}")
        assert hint in "\n".join(reply.error["traceback"])
        assert "pushed before" not in "\n".join(reply.error["traceback"])
    kernel.run("%dist_push use\nlater = 1")
    lines = "\n".join(kernel.run("%%dist\nuse()").error["traceback"])
    assert "    return mine + later" in re.sub(r"\x1b\[[\d;]*m", "", lines)
    assert "%dist_push later" in lines
    assert "pushed before takes it along if it is pushed again" in lines
    kernel.run("%dist_push use")
    assert kernel.run("%%dist\nuse()").stdout == "[ranks 0-1] 2\n"
    reply = kernel.run("%%dist\nnothing_such")
    assert "%dist_push" not in "\n".join(reply.error["traceback"])


def test_a_name_that_only_other_ranks_have_is_explained(kernel: Kernel) -> None:
    kernel.run("%%dist 0\nof_rank_0 = 1")
    reply = kernel.run("%%dist\nof_rank_0")
    lines = "\n".join(reply.error["traceback"])
    assert "rank 0 went past this line. If of_rank_0 is there, the cell that" in lines
    assert "%%dist 1 at the top of that cell runs it there alone" in lines
    lines = "\n".join(kernel.run("%%dist\nof_no_rank").error["traceback"])
    assert "went past" not in lines


def test_status_is_a_table_by_rank(kernel: Kernel) -> None:
    text = kernel.run("%dist_status").result["text/plain"]
    assert re.search(r"^0 .*cpu +idle +\d+ MiB +[\d.]+ GiB", text, re.MULTILINE)


def test_training_shows_one_live_picture_and_returns_the_run(
    kernel: Kernel, tmp_path: Path
) -> None:
    drawn, enough = set(), tmp_path / "enough"

    def count(message: dict[str, Any]) -> None:
        drawn.add(message["content"].get("data", {}).get("image/png"))
        if len(drawn - {None}) >= 3:
            enough.touch()

    reply = kernel.run(
        "%%dist_train raw --name first\n"
        "import pathlib, time\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.001)\n"
        f"while not pathlib.Path({str(enough)!r}).exists():\n"
        "    model(torch.ones(1, 1)).sum().square().backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(0.01)\n",
        on_message=count,
    )
    assert reply.status == "ok"
    assert reply.stdout == ""
    assert re.fullmatch(
        r"<Run 'first': raw on 2 ranks, finished, [\d,]+ steps>",
        reply.result["text/plain"],
    )
    pictures = [*reply.displays, *reply.updates]
    assert len(reply.displays) == 1
    assert {data["text/plain"] for data in pictures} == {
        "<live picture of first: loss and memory by rank>"
    }
    assert len(reply.alternatives) == len(pictures)
    last = (
        r"first: raw on 2 ranks, finished, step [\d,]+, .*; loss and memory by rank.*"
    )
    assert re.fullmatch(last, reply.alternatives[-1])
    kernel.run("run = _")
    assert "text/html" in kernel.run("run.summary()").result
    plotted = kernel.run("run.plot()")
    assert "image/png" in plotted.result
    assert "loss by optimizer step; peak of measured steps" in plotted.alternatives[0]


@pytest.mark.long
def test_the_loss_is_on_a_log_scale_if_so_asked(kernel: Kernel) -> None:
    kernel.run(LOOP.format(options="--log-scale", epochs=1))
    kernel.run("import labkit\nrun = labkit.current_lab().runs[-1]")
    scales = "[run.plot(log_scale=s).axes[0].get_yscale() for s in (None, False)]"
    assert kernel.run(scales).result["text/plain"] == "['log', 'linear']"


def test_no_live_shows_no_picture(kernel: Kernel) -> None:
    reply = kernel.run(LOOP.format(options="--no-live", epochs=1))
    assert reply.status == "ok"
    assert reply.displays == []


def test_a_function_of_the_notebook_trains_with_all_it_refers_to(
    kernel: Kernel,
) -> None:
    kernel.run(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "def show(text):\n"
        "    print(text)\n"
        "def work(rank, world_size):\n"
        "    show(f'{rank} of {world_size}')\n"
        "    model = Net()\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    reply = kernel.run("%dist_train raw work --name function")
    assert reply.stdout == "[rank 0] 0 of 2\n[rank 1] 1 of 2\n"
    assert "raw on 2 ranks, finished, 1 step>" in reply.result["text/plain"]


def test_a_traceback_from_a_function_names_its_cell_and_lines(kernel: Kernel) -> None:
    number = int(kernel.run("len(In) - 1").result["text/plain"])
    kernel.run("def broken():\n    a = 1\n    a / 0")
    reply = kernel.run("%dist_train raw broken")
    assert reply.status == "error"
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(reply.error["traceback"]))
    assert f"Cell In[{number + 1}], line 3, in broken()" in text
    assert "ZeroDivisionError" in text


def test_a_failing_rank_gives_the_cell_an_error_with_its_own_lines(
    kernel: Kernel,
) -> None:
    number = int(kernel.run("len(In) - 1").result["text/plain"])
    code = "%%dist\n\nif rank == 1:\n    raise ValueError('on purpose')\ndist.barrier()"
    reply = kernel.run(code)
    assert reply.status == "error"
    assert reply.error["ename"] == "RankError"
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(reply.error["traceback"]))
    assert "On rank 1:" in text
    assert f"Cell In[{number + 1}], line 4" in text
    assert "----> 4     raise ValueError('on purpose')" in text
    assert "rank 0: stopped at line 5: dist.barrier(), because rank 1 failed" in text
    assert "labkit/notebook" not in text


def test_the_debugger_opens_the_users_line_and_not_labkits(kernel: Kernel) -> None:
    kernel.run("def on_ranks(): labkit.current_lab().run('1 / 0')")
    for cell, name in (
        ("import labkit\non_ranks()", "on_ranks"),
        ("%%dist\n1 / 0", "<module>"),
    ):
        assert kernel.run(cell).error["ename"] == "RankError"
        code = "import sys, traceback\n[*traceback.walk_tb(sys.last_traceback)][-1][0]"
        frame = kernel.run(f"{code}.f_code.co_name").result["text/plain"]
        assert frame == repr(name)


@pytest.mark.parametrize(
    "waits_in",
    [
        "time.sleep(60)",
        "while True: pass",
        "dist.barrier() if rank == 0 else dist.all_gather_object([0, 0], 1)",
        "dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(60)",
    ],
)
def test_the_stop_button_ends_a_cell_and_the_next_one_works(
    kernel: Kernel, waits_in: str
) -> None:
    kernel.run("%%dist\nkept = 7 + rank")

    def interrupt_once_running(message: dict[str, Any]) -> None:
        if "here" in message["content"].get("text", ""):
            threading.Timer(0.0, kernel.manager.interrupt_kernel).start()

    code = f"%%dist\nimport time\nprint('here')\n{waits_in}"
    reply = kernel.run(code, timeout=30, on_message=interrupt_once_running)
    assert reply.status == "error"
    assert reply.error["ename"] == "Interrupted"
    assert "every rank keeps its variables" in reply.error["traceback"][0]
    code = "%%dist\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, x.item())"
    assert kernel.run(code).stdout == "[rank 0] 7 2.0\n[rank 1] 8 2.0\n"


def test_a_crash_names_its_line(kernel: Kernel) -> None:
    """Where the kernel's loop runs: ipyparallel takes the log of what has ended."""
    code = "import os\nif rank == 1:\n    os.abort()\ndist.barrier()"
    said = kernel.run(f"%%dist\n{code}").error["evalue"]
    assert said.startswith("rank 1: the process died at line 4: os.abort(); pid ")
    assert kernel.run("%dist_restart").status == "ok"


def test_a_killed_rank_is_brought_back_by_restart(kernel: Kernel) -> None:
    reply = kernel.run("%%dist 1\nimport os\nos.kill(os.getpid(), 9)")
    assert "the process died" in reply.error["evalue"]
    assert "killed by SIGKILL" in reply.error["evalue"]
    status = kernel.run("%dist_status").result["text/plain"]
    assert "dead" in status
    assert "NaN" not in status
    assert "%dist_restart" in usage_error(kernel, "%%dist\n1")
    assert kernel.run("%dist_restart").stdout.startswith(
        "rank 1 restarted: its variables are gone; Ready: "
    )
    assert kernel.run("%dist_restart").stdout.startswith("no rank was dead; Ready: ")
    assert kernel.run("%%dist\ndist.barrier()\nprint('ok')").stdout == (
        "[ranks 0-1] ok\n"
    )


@pytest.fixture(scope="module")
def second() -> Iterator[Kernel]:
    """Another kernel, without a lab."""
    with running_kernel() as kernel:
        kernel.run("%load_ext labkit")
        yield kernel


def test_start_is_one_line_stop_is_quiet_and_start_works_again(second: Kernel) -> None:
    out = second.run("%dist_start -n 1").stdout
    assert out.count("\n") == 1
    states = [state.strip() for state in out.split("\r")[1:]]
    assert states[0] == "starting the controller"
    assert states[-1].startswith("Ready: 1 rank on the CPU, gloo")
    assert second.lab_tokens()
    painter = psutil.Process(int(second.run(PAINTER).stdout))
    reply = second.run("%dist_stop")
    assert (reply.status, reply.streams) == ("ok", {})
    assert second.lab_tokens() == set()
    assert not painter.is_running()
    assert second.run("%dist_stop").status == "ok"
    assert "Ready: 1 rank" in second.run("%dist_start -n 1").stdout
    second.run("%dist_stop")


# ---- strategies, runs and the forecast ----


@pytest.mark.long
def test_comparing_strategies_is_editing_one_word(kernel: Kernel) -> None:
    for strategy in ("single", "ddp", "fsdp"):
        code = LOOP.format(options=f"--name {strategy} --no-live", epochs=1)
        reply = kernel.run(code.replace("ddp", strategy, 1))
        assert reply.status == "ok", reply.stderr
    reply = kernel.run("table = %dist_runs single ddp fsdp")
    assert reply.status == "ok", reply.stderr
    assert "image/png" in reply.displays[0]
    shown = kernel.run("print(table.columns.tolist(), table.index.tolist())").stdout
    assert shown.startswith("['single', 'ddp', 'fsdp'] ['strategy', 'ranks', 'state'")
    assert "'parameters (KiB)'" in shown
    assert "master_parameters" not in shown, "none of them has any"
    losses = kernel.run("print(table.loc['last_loss'].nunique())")
    assert losses.stdout == "1\n"


@pytest.mark.long
def test_runs_are_listed_filtered_and_deleted(
    kernel: Kernel, runs_folder: Path
) -> None:
    def names(line: str) -> list[str]:
        kernel.run(f"table = {line}")
        shown = kernel.run("print(*table.index)").stdout.split()
        return [name for name in shown if name.startswith("listed-")]

    for name in ("listed-1", "listed-2"):
        kernel.run(LOOP.format(options=f"--name {name} --no-live", epochs=1))
    kernel.run("%%dist_train raw --name listed-3 --no-live\n1 / 0")
    assert names("%dist_runs") == ["listed-1", "listed-2", "listed-3"]
    assert names("%dist_runs --strategy raw") == ["listed-3"]
    assert names("%dist_runs --state finished --last 1") == ["listed-2"]
    reply = kernel.run("%dist_runs --delete listed-1 listed-3")
    assert re.fullmatch(r"deleted \S+-listed-1, \S+-listed-3\n", reply.stdout)
    assert names("%dist_runs") == ["listed-2"]
    assert [path.name[16:] for path in runs_folder.iterdir()] == ["listed-2"]
    for line, message in (
        ("%dist_runs listed-1", "there is no run 'listed-1'"),
        ("%dist_runs --delete listed-1", "there is no run 'listed-1'"),
        ("%dist_runs --last 0", "last is 0; it must be a whole number, 1 or more"),
        ("%dist_runs listed-2 --last 1", "give names, or --delete, or what to list"),
    ):
        assert message in usage_error(kernel, line)


def test_runs_on_disk_are_there_without_a_lab(
    kernel: Kernel, second: Kernel, runs_folder: Path
) -> None:
    for name in ("one", "other"):
        kernel.run(LOOP.format(options=f"--name {name} --no-live", epochs=1))
    second.run(f"import os\nos.environ['LABKIT_RUNS'] = {str(runs_folder)!r}")
    reply = second.run("table = %dist_runs\nprint(*table.index)")
    assert reply.stdout == "one other\n"
    reply = second.run("table = %dist_runs one other one\nprint(*table.columns)")
    assert reply.stdout == "one other\n"
    assert "image/png" in reply.displays[0]


def test_a_config_is_a_dict_of_the_notebook(kernel: Kernel) -> None:
    kernel.run("settings = {'bucket_cap_mb': 1}\nwrong = {'bucket': 1}")
    code = LOOP.format(options="--config settings --no-live", epochs=1)
    assert kernel.run(code).status == "ok"
    reply = kernel.run(code.replace("settings", "wrong"))
    assert reply.status == "error"
    problem = "\n".join(reply.error["traceback"])
    assert "DistributedDataParallel has no 'bucket'; it knows: " in problem
    assert "the notebook has no variable 'nothing'" in usage_error(
        kernel, code.replace("settings", "nothing")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--accumulate 0", "accumulate is 0; it must be a whole number, 1 or more"),
        ("--clip -1", "clip is -1.0; it must be a positive number"),
        ("--precision fp16", "fp16 needs a GPU"),
    ],
)
def test_wrong_options_of_a_step_are_reported(
    kernel: Kernel, options: str, message: str
) -> None:
    assert message in usage_error(kernel, LOOP.format(options=options, epochs=1))


@pytest.mark.release
def test_memory_is_forecast_for_every_strategy(kernel: Kernel) -> None:
    kernel.run("from labkit.models import GPT\ngpt = GPT(64, context=16, dim=32)")
    reply = kernel.run("%dist_estimate gpt --sequence 16 --batch-size 8 --ranks 2,8")
    assert reply.status == "ok", reply.stderr
    _, table = reply.displays
    text = table["text/plain"]
    for strategy in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"):
        assert strategy in text
    kernel.run("import torch\nencoder = torch.nn.Transformer(32, 2, 1, 1)")
    for line, option in {
        "gpt": "--batch-size B and --sequence T",
        "gpt --batch-size 8": "give --sequence T, because",
        "encoder --batch-size 8": "--input NAME, a variable with a batch: a tuple",
    }.items():
        reply = kernel.run(f"%dist_estimate {line}")
        assert reply.status == "ok", reply.stderr
        assert "?" in reply.displays[1]["text/plain"]
        assert "Activations are not included: give" in reply.stdout
        assert option in reply.stdout
    kernel.run("%%dist\nfrom labkit.models import GPT\non_rank = GPT(64, context=16)")
    reply = kernel.run("%dist_estimate on_rank --sequence 16 --batch-size 8")
    assert reply.status == "ok", reply.stderr
    assert "has a variable" in usage_error(kernel, "%dist_estimate nothing_such")
