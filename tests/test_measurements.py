"""Memory by component and bytes in collectives, measured on real ranks."""

import math

import pytest
import torch
from marks import LONG
from marks import in_suites
from marks import release_but

from labkit import Lab
from labkit.magics.lab_magics import to_read
from labkit.notebook.runs.run import Run
from labkit.rank.measuring.step_profiler import Noticed
from labkit.rank.measuring.step_profiler import StepProbe
from labkit.records import NO_STEPS
from labkit.records import PARTS
from labkit.records import ModelFacts
from labkit.strategies import STRATEGIES
from labkit.strategies.prepared import Prepared
from labkit.strategies.prepared import optimizer_tensors
from labkit.train_options import TrainOptions

MIB = 2**20

# The reference values of 2.1 M parameters in fp32 under AdamW on two ranks, in MiB.
NUM_LAYERS = 8
NUM_PARAMETERS = NUM_LAYERS * (512 * 512 + 512)
WHOLE = 4 * NUM_PARAMETERS / MIB  # 8.02
HALF = WHOLE / 2

CELL = f"""
import torch.nn.functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range({NUM_LAYERS})))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(48, 512), torch.randn(48, 512))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=16)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def runs(shared_lab: Lab) -> dict[tuple[str, int], Run]:
    """The same cell under every strategy, with one and with two microbatches."""
    shared_lab.restart()
    return {
        (strategy, accumulate): shared_lab.train(
            strategy, CELL, accumulate=accumulate, live=False
        )
        for strategy in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
        for accumulate in (1, 2)
    }


# Parameters, gradients, optimizer state, fp32 master copy.
REFERENCE = {
    ("single", 1): (WHOLE, WHOLE, 2 * WHOLE, 0),
    ("single", 2): (WHOLE, WHOLE, 2 * WHOLE, 0),
    ("ddp", 1): (WHOLE, WHOLE, 2 * WHOLE, 0),
    ("ddp", 2): (WHOLE, WHOLE, 2 * WHOLE, 0),
    ("zero1", 1): (WHOLE, WHOLE, WHOLE, HALF),
    ("zero1", 2): (WHOLE, WHOLE, WHOLE, HALF),
    ("zero2", 1): (WHOLE, HALF, WHOLE, HALF),
    ("zero2", 2): (WHOLE, HALF, WHOLE, HALF),
    ("zero3", 1): (HALF, HALF, WHOLE, HALF),
    ("zero3", 2): (HALF, HALF, WHOLE, HALF),
    ("fsdp", 1): (HALF, HALF, WHOLE, 0),
    # Gradients stay whole until the last microbatch: that is the price of silence.
    ("fsdp", 2): (HALF, WHOLE, WHOLE, 0),
}


@pytest.mark.parametrize("key", REFERENCE, ids="{0[0]}-{0[1]}".format)
def test_model_states_are_what_they_are_known_to_be(
    key: tuple[str, int], runs: dict[tuple[str, int], Run]
) -> None:
    memory = runs[key].memory / MIB
    names = ["parameters", "gradients", "optimizer_state", "master_parameters"]
    for rank in memory.index:
        found = memory.loc[rank, names].tolist()
        assert found == pytest.approx(REFERENCE[key], rel=0.01), f"rank {rank}"
    # The total has the states in it, and what the optimizer needs for a moment.
    states = memory.loc[0, names].sum()
    assert states < memory.loc[0, "total_peak"] < states + 2 * WHOLE


@pytest.mark.parametrize("key", REFERENCE, ids="{0[0]}-{0[1]}".format)
def test_theory_agrees_with_the_model_states(
    key: tuple[str, int], runs: dict[tuple[str, int], Run]
) -> None:
    run = runs[key]
    for component, expected in run.theory.items():
        if component != "wire_bytes":
            found = run.memory[component].max()
            assert found == pytest.approx(expected, rel=0.01, abs=1), component


def test_activations_are_those_of_the_microbatch(
    runs: dict[tuple[str, int], Run],
) -> None:
    # The layers keep their input, and what the loss needs; two ranks share a batch.
    one_layer = 16 * 512 * 4
    whole = runs["single", 1].memory.loc[0, "activations_peak"]
    assert (NUM_LAYERS - 1) * one_layer <= whole <= (NUM_LAYERS + 3) * one_layer
    for strategy in ("ddp", "zero2", "fsdp"):
        # Gathered parameters and an input may be there until gloo frees them.
        freed_late = 512 * 513 * 4 + one_layer if strategy == "fsdp" else 0
        shared = runs[strategy, 1].memory.loc[0, "activations_peak"]
        assert 0.9 * whole / 2 <= shared <= 1.1 * whole / 2 + freed_late
        halved = runs[strategy, 2].memory.loc[0, "activations_peak"]
        assert 0.7 * whole / 4 <= halved <= 1.3 * whole / 4 + freed_late


def sent(run: Run) -> dict[str, float]:
    """MiB that rank 0 sends in a step, by kind of collective."""
    comm = run.comm.loc[0]
    return {kind: row["wire_bytes"] / MIB for kind, row in comm.iterrows()}


def test_collectives_send_the_textbook_volume(
    runs: dict[tuple[str, int], Run],
) -> None:
    # On two ranks a gather or a reduce-scatter of all sends half, an all-reduce all.
    assert runs["single", 1].comm.empty
    assert sent(runs["ddp", 1]) == pytest.approx({"all_reduce": WHOLE}, rel=0.01)
    assert sent(runs["ddp", 2]) == pytest.approx({"all_reduce": WHOLE}, rel=0.01)
    fsdp = {"all_gather": 2 * HALF, "reduce_scatter": HALF}
    assert sent(runs["fsdp", 1]) == pytest.approx(fsdp, rel=0.01)
    fsdp["all_gather"] *= 2
    assert sent(runs["fsdp", 2]) == pytest.approx(fsdp, rel=0.01)
    # DeepSpeed all-reduces where ZeRO would reduce: twice the bytes of the paper.
    zero = {"all_reduce": WHOLE, "all_gather": HALF}
    assert sent(runs["zero1", 1]) == pytest.approx(zero, rel=0.01)
    assert sent(runs["zero2", 1]) == pytest.approx(zero, rel=0.01)
    zero3 = sent(runs["zero3", 1])
    assert zero3["all_gather"] == pytest.approx(2 * HALF, rel=0.1)
    assert zero3["reduce_scatter"] == pytest.approx(HALF, rel=0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_theory_agrees_with_the_bytes_sent(
    strategy: str, runs: dict[tuple[str, int], Run]
) -> None:
    for accumulate in (1, 2):
        run = runs[strategy, accumulate]
        wire = run.comm["wire_bytes"].groupby("rank").sum()
        assert wire.max() == pytest.approx(run.theory["wire_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "config", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}]
)
@pytest.mark.parametrize("strategy", release_but(["fsdp", "hsdp"], "hsdp"))
@pytest.mark.long
def test_theory_knows_what_stays_gathered(
    lab: Lab, strategy: str, config: dict[str, bool]
) -> None:
    # The outermost module has as many parameters of its own as a block.
    code = SMALL.replace(
        "optimizer = ",
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = model\n"
        "        self.head = torch.nn.Linear(512, 512)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.blocks(x))\n"
        "model = Net()\noptimizer = ",
    )
    for accumulate in (1, 2):
        run = lab.train(
            strategy, code, config=config, accumulate=accumulate, live=False
        )
        wire = run.comm["wire_bytes"].groupby("rank").sum()
        assert wire.max() == pytest.approx(run.theory["wire_bytes"], rel=0.01)


def test_collectives_take_time(runs: dict[tuple[str, int], Run]) -> None:
    for (strategy, _), run in runs.items():
        if strategy != "single":
            assert (run.comm["seconds"] > 0).all()
            assert (run.comm["count"] > 0).all()


def test_raw_cells_are_not_measured(lab: Lab) -> None:
    run = lab.train("raw", "log(loss=1.0)", live=False)
    assert run.memory.empty
    assert run.comm.empty
    assert run.theory == {}


def test_a_mode_of_the_cells_own_is_not_disturbed(lab: Lab) -> None:
    code = CELL.replace(
        "for x, y in loader:",
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "counter = FlopCounterMode(display=False)\n"
        "counter.__enter__()\n"
        "for x, y in loader:",
    )
    run = lab.train("ddp", code + "\ncounter.__exit__(None, None, None)", live=False)
    assert run.state == "finished"
    lab.run("flops = counter.get_total_flops()")
    assert lab.pull("flops") > 0


SMALL = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(48, 512), torch.randn(48, 512))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=16)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SMALL_WHOLE = 4 * 4 * (512 * 512 + 512)


def test_gradients_summed_in_another_precision_are_no_activations(lab: Lab) -> None:
    run = lab.train("fsdp", SMALL, precision="bf16", accumulate=2, live=False)
    assert run.memory["gradients"].max() == pytest.approx(SMALL_WHOLE, rel=0.01)
    assert run.memory["activations_peak"].max() < SMALL_WHOLE / 4


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_the_weights_of_another_model_are_no_activations(
    lab: Lab, strategy: str
) -> None:
    teacher = "teacher = torch.nn.Linear(512, 512 * 8)\n"
    guided = "    with torch.no_grad():\n        y = y + teacher(x)[:, :512]\n    F.mse"
    code = teacher + SMALL.replace("    F.mse", guided)
    plain = lab.train(strategy, SMALL, live=False).memory.max()
    run = lab.train(strategy, code, live=False).memory.max()
    weights = 4 * 512 * 8 * 513
    # With fsdp a block's gathered parameters may be there until gloo releases them,
    # in either of the two runs.
    assert run["activations_peak"] < plain["activations_peak"] + weights / 4
    assert run["total_peak"] > plain["total_peak"] + weights * 3 / 4


def test_buckets_beside_the_gradients_are_counted(lab: Lab) -> None:
    config = {"gradient_as_bucket_view": False}
    run = lab.train("ddp", SMALL, config=config, live=False)
    assert run.memory["communication_buffers"].tolist() == [SMALL_WHOLE] * 2
    plain = lab.train("ddp", SMALL, live=False)
    more = run.memory["total_peak"] - plain.memory["total_peak"]
    assert more.min() == pytest.approx(SMALL_WHOLE, rel=0.05)


UNEVEN = """
from torch import nn
from torch.utils.data import TensorDataset
def block(width):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))
model = nn.Sequential(*(block(2048 if i == {large} else 8) for i in range(24)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = prepare(
    model, optimizer, TensorDataset(torch.ones(24, 32)), batch_size=8
)
for (x,) in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LARGE_BYTES = 4 * (32 * 2048 + 2048)


def test_buckets_stay_when_gradients_are_set_to_none(lab: Lab) -> None:
    code = """
model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(6 * batch_size, 300)
model, optimizer, loader = prepare(model, optimizer, data, batch_size=batch_size)
for x in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = {}
    for strategy, batch_size in (("single", 1024), ("ddp", 2048)):
        lab.push(batch_size=batch_size)
        run = lab.train(strategy, code, live=False)
        found[strategy] = run.collector.measurements[0][-1].memory
    # Where the backward pass begins, one process has no gradients yet.
    more = found["ddp"]["total_peak"] - found["single"]["total_peak"]
    assert more >= 0.9 * found["ddp"]["gradients"]


@pytest.mark.parametrize(
    ("strategy", "component", "large"),
    [
        ("fsdp", "communication_buffers", 12),
        pytest.param("zero3", "communication_buffers", 12, marks=LONG),
        ("zero1", "gradients", 0),
    ],
)
def test_one_large_layer_among_many_is_seen(
    lab: Lab, strategy: str, component: str, large: int
) -> None:
    """However short it is gathered for, and though its gradient is the last to come and
    the first to be reduced."""
    run = lab.train(strategy, UNEVEN.format(large=large), live=False)
    assert run.memory[component].min() >= LARGE_BYTES


def test_what_zero_has_for_a_moment_of_its_step_is_known(lab: Lab) -> None:
    """Its part of the gradients, in fp32: while it steps it has no others."""
    run = lab.train("zero1", UNEVEN.format(large=12), live=False)
    moments = run.step_memory
    moments = moments[(moments["rank"] == 0) & (moments["phase"] == "step")]
    stepping = moments.loc[moments["activations"].idxmax()]
    assert stepping["gradients"] >= stepping["master_parameters"]


def test_gradients_that_a_hook_steps_with_are_counted() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    first = next(model.parameters())  # the last that gets its gradient
    first.register_post_accumulate_grad_hook(step)
    probe = StepProbe([Noticed(lambda: [optimizer])], torch.device("cpu"))
    probe.start()
    loss = model(torch.ones(2, 8)).sum()
    probe.begin_backward()
    loss.backward()
    probe.end_backward()
    assert probe.stop()
    measured = probe.measurement()
    assert measured is not None
    assert measured.memory["gradients"] == sum(p.nbytes for p in model.parameters())


def test_what_is_resized_without_an_operator_is_seen() -> None:
    """As FSDP frees what it has gathered: at once, or peaks would have both."""
    probe = StepProbe([Noticed(list)], torch.device("cpu"))
    probe.start()
    first = torch.empty(2**20, dtype=torch.uint8)
    first.untyped_storage().resize_(0)
    torch.empty(2**19, dtype=torch.uint8)
    first.untyped_storage().resize_(2**18)
    second = torch.empty(2**19, dtype=torch.uint8)
    third = second + 1
    assert probe.stop()
    measured = probe.measurement()
    assert measured is not None
    assert measured.memory["total_peak"] == 2**18 + 2**20
    del first, second, third


def test_what_is_offloaded_is_not_on_the_device() -> None:
    model = torch.nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = Prepared(
        STRATEGIES["single"],
        model,
        optimizer,
        None,
        torch.device("meta"),
        TrainOptions(),
    )
    model.weight.grad = torch.ones(8, 8, device="meta")
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(8, 8)  # on the host
    probe = StepProbe([prepared], torch.device("meta"), sees_operators=False)
    probe.start()
    probe.end_backward()
    assert probe.stop()
    measured = probe.measurement()
    assert measured is not None
    assert measured.memory["gradients"] == 8 * 8 * 4
    assert measured.memory["optimizer_state"] == 0
    [facts] = measured.models
    assert facts.offloaded == ["optimizer_state"]
    states = STRATEGIES["single"].theory.model_states(facts, TrainOptions())
    assert states["gradients"] > states["optimizer_state"] == 0


def test_every_collective_is_counted(lab: Lab) -> None:
    talk = """
    whole = torch.ones(8 * world_size)
    part = torch.ones(8)
    parts = list(whole.chunk(world_size))
    dist.gather(part, parts if rank == 0 else None, dst=0)
    dist.scatter(part, parts if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.barrier()
    # Each begins to send before it receives.
    sent = dist.isend(whole, 1 - rank)
    received = dist.irecv(torch.empty_like(whole), 1 - rank)
    sent.wait(), received.wait()
    optimizer.step()
"""
    run = lab.train("fsdp", SMALL.replace("    optimizer.step()\n", talk), live=False)
    for rank in (0, 1):
        comm = run.comm.loc[rank]
        assert comm.loc["gather", ["payload_bytes", "wire_bytes"]].tolist() == [64, 16]
        assert comm.loc["scatter", ["payload_bytes", "wire_bytes"]].tolist() == [64, 16]
        assert comm.loc["all_to_all", "wire_bytes"] == 32
        assert comm.loc["barrier", ["count", "wire_bytes"]].tolist() == [1, 0]
        assert comm.loc["send", "wire_bytes"] == 64
        assert comm.loc["recv", ["payload_bytes", "wire_bytes"]].tolist() == [64, 0]


COMPILED = {
    "before prepare": ("model, optimizer, loader =", "model = compiled(model)\n"),
    "after prepare": ("for x, y", "model = compiled(model)\n"),
    "the loss": ("for x, y", "loss_fn = compiled(loss_fn)\n"),
}
COMPILE = """
from torch._dynamo.utils import counters
torch._dynamo.reset()
counters.clear()
def loss_fn(output, y):
    return F.mse_loss(output, y)
def compiled(what):
    return torch.compile(what, backend="aot_eager")
"""


@pytest.mark.parametrize(
    "strategy",
    in_suites(["single", "ddp", "zero2", "fsdp"], long=["ddp"]),
)
@pytest.mark.parametrize("what", COMPILED)
def test_what_a_cell_compiles_is_compiled(lab: Lab, what: str, strategy: str) -> None:
    if (what, strategy) == ("before prepare", "fsdp"):
        pytest.skip("torch's own: it breaks the graph at the hooks of fully_shard")
    place, added = COMPILED[what]
    code = COMPILE + SMALL.replace("F.mse_loss(", "loss_fn(")
    code = code.replace(place, added + place)
    run = lab.train(strategy, code, live=False)
    lab.run("graphs = counters['stats']['unique_graphs']", ranks=0)
    assert lab.pull("graphs") >= 1
    plain = lab.train(strategy, SMALL, live=False)
    assert run.last_loss == pytest.approx(plain.last_loss, rel=1e-5)
    # And what it does is measured.
    for column in ("gradients", "total_peak"):
        assert run.memory[column].max() == pytest.approx(
            plain.memory[column].max(), rel=0.15
        )
    assert run.comm["wire_bytes"].sum() == plain.comm["wire_bytes"].sum()


def test_a_profiler_does_not_see_the_measuring(lab: Lab) -> None:
    code = SMALL.replace("randn(48", "randn(160").replace(
        "for x, y in loader:",
        "profiler = torch.profiler.profile()\n"
        "profiler.start()\n"
        "for step, (x, y) in enumerate(loader):\n"
        "    if step == 5:\n"
        "        profiler.stop()",
    )
    run = lab.train("ddp", code, live=False)
    lab.run("names = {event.key for event in profiler.key_averages()}")
    assert "aten::addmm" in lab.pull("names")
    assert len(run.collector.measurements[0]) == 2  # put off to the 7th; the 10th
    assert run.notes == []
    run = lab.train("ddp", code.replace("step == 5", "step == 8"), live=False)
    assert len(run.collector.measurements[0]) == 1
    whole = code.replace("if step == 5", "if step == -1") + "profiler.stop()\n"
    run = lab.train("ddp", whole, live=False)
    assert run.memory.empty
    assert "a profiler is active" in run.notes[0]


SPARSE = """
import torch.nn.functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(100, 8, sparse=True), torch.nn.Flatten(), torch.nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randint(0, 100, (48, 4)), torch.randn(48, 2))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=16)
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [p.detach().clone() for p in model.parameters()]
"""


def test_sparse_gradients_are_measured(lab: Lab) -> None:
    weights = {}
    for strategy in ("single", "ddp"):
        run = lab.train(strategy, SPARSE, live=False)
        # At most 32 rows of the embedding, with a place each; and the rest.
        rest = 4 * (32 * 2 + 2)
        assert rest < run.memory["gradients"].max() <= rest + 64 * (8 * 4 + 8)
        weights[strategy] = lab.pull("weights")
    torch.testing.assert_close(weights["ddp"], weights["single"])


@pytest.mark.parametrize(
    "strategy",
    release_but(["zero1", "zero2", "zero3", "fsdp", "hsdp"], "zero1", "fsdp"),
)
def test_what_cannot_be_sharded_is_refused(lab: Lab, strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"UnsupportedLoopError: 0 is an embedding"):
        lab.train(strategy, SPARSE, live=False)
    scalar = SMALL.replace(
        "optimizer = ",
        "model.scale = torch.nn.Parameter(torch.tensor(1.0))\noptimizer = ",
    )
    with pytest.raises(RuntimeError, match="scale is a parameter without a dimension"):
        lab.train(strategy, scalar, live=False)
    lab.run("model = model.to('cpu')")  # untouched
    assert lab.pull("model")[0].weight.shape == (512, 512)


def test_a_compiled_model_under_zero3_is_refused(lab: Lab) -> None:
    place, added = COMPILED["before prepare"]
    code = COMPILE + SMALL.replace(place, added + place)
    with pytest.raises(RuntimeError, match=r"comes from torch\.compile.*--compile"):
        lab.train("zero3", code, live=False)


@pytest.mark.parametrize("strategy", release_but(["zero1", "zero2", "zero3"], "zero3"))
def test_what_zero_trained_with_is_not_charged_to_the_next_run(
    lab: Lab, strategy: str
) -> None:
    lab.train(strategy, SMALL, live=False)
    lab.run(
        """
        def bytes_of(kind):
            held = list(kind.memory().values())
            return {
                tensor.untyped_storage()._cdata: tensor.untyped_storage()
                for tensors in held for tensor in tensors if tensor is not None
            }
        trained_with = list(bytes_of(optimizer.prepared).values())
        before = sum(storage.nbytes() for storage in trained_with)
        import weakref
        trained_with = [weakref.ref(storage) for storage in trained_with]
        kept, batch, output = model, x, model(x).detach()
        del model, optimizer, loader
        """
    )
    lab.train("raw", "log(x=1.0)", live=False)
    lab.run(
        """
        import gc
        gc.collect()
        alive = [storage() for storage in trained_with]
        after = sum(storage.nbytes() for storage in alive if storage is not None)
        torch.testing.assert_close(kept(batch), output)
        """
    )
    share = 1 if strategy == "zero3" else 2  # what the model has, in whole or in parts
    for before, after in zip(
        lab.pull("before", "all"), lab.pull("after", "all"), strict=True
    ):
        assert after <= 1.05 * share * SMALL_WHOLE / 2
        assert before > 2 * after


def test_a_run_under_zero3_keeps_no_model_of_earlier_ones(lab: Lab) -> None:
    lab.run("import gc, weakref\nmodels = []")
    for _ in range(3):
        lab.train("zero3", f"{SMALL}\nmodels.append(weakref.ref(model))", live=False)
    lab.run("gc.collect()\nalive = [model() is not None for model in models]")
    assert lab.pull("alive", "all") == [[False, False, True]] * 2


# ---- runs side by side ----


def test_runs_are_compared_in_one_table(
    shared_lab: Lab, runs: dict[tuple[str, int], Run]
) -> None:
    names = [runs[strategy, 1].name for strategy in ("single", "ddp", "zero3")]
    table = shared_lab.compare(*names)
    assert table.index.tolist() == names
    assert table["strategy"].tolist() == ["single", "ddp", "zero3"]
    assert table["ranks"].tolist() == [1, 2, 2]
    # The same seed, model and batches: the same training.
    assert table["last_loss"].tolist() == pytest.approx(
        [table["last_loss"].iloc[0]] * 3, rel=1e-4
    )
    assert table["parameters"].tolist() == pytest.approx(
        [WHOLE * MIB, WHOLE * MIB, HALF * MIB], rel=0.01
    )
    assert table["wire_bytes"].tolist()[0] == 0.0
    figure = shared_lab.plot_runs(*names)
    assert len(figure.axes) == 6
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_run_that_is_not_there_is_reported(lab: Lab) -> None:
    lab.train("raw", "log(x=1)", name="newest", live=False)
    told = r"there is no run 'nowhere' in .*; of this lab: .*newest$"
    with pytest.raises(ValueError, match=told) as caught:
        lab.compare("nowhere")
    assert str(caught.value).count("newest") == 1


def test_every_strategy_is_known_to_theory() -> None:
    model = ModelFacts(100, 100, state_bytes=8, num_shards=4)
    for strategy in STRATEGIES.values():
        states = strategy.theory.model_states(model, TrainOptions())
        wire = strategy.theory.wire_bytes(model, TrainOptions(), 4)
        if strategy.technique is None:
            assert states == {}
            assert wire != wire
        else:
            assert states["parameters"] > 0
            assert wire >= 0


# ---- a step, moment by moment ----


@pytest.mark.parametrize("key", REFERENCE, ids="{0[0]}-{0[1]}".format)
def test_the_parts_of_a_step_add_up_to_its_peak(
    key: tuple[str, int], runs: dict[tuple[str, int], Run]
) -> None:
    run = runs[key]
    moments = run.step_memory
    assert moments["step"].unique().tolist() == [3]
    assert moments.groupby("rank").size().max() <= 320
    totals = moments[[*PARTS]].sum(axis=1).groupby(moments["rank"]).max()
    last = {rank: each[-1] for rank, each in run.collector.measurements.items()}
    for rank, total in totals.items():
        assert total == pytest.approx(last[rank].memory["total_peak"], rel=0.01)
    phases = moments.loc[moments["rank"] == 0, "phase"]
    order = phases[phases != phases.shift()].tolist()
    assert order == ["forward", "backward"] * key[1] + ["step"]
    assert moments.groupby("rank")["seconds"].is_monotonic_increasing.all()


def test_a_gradient_is_one_from_where_it_is_made(
    runs: dict[tuple[str, int], Run],
) -> None:
    moments = runs["single", 1].step_memory
    in_forward = moments[moments["phase"] == "forward"]
    assert in_forward["gradients"].max() == 0
    assert (moments["parameters"] / MIB).tolist() == pytest.approx(
        [WHOLE] * len(moments), rel=0.01
    )
    growing = moments.loc[moments["phase"] == "backward", "gradients"] / MIB
    # Where the rank was held up, a phase has eight moments, some of them equal.
    assert growing.nunique() > 4
    # Within a pass one may be there twice, where it is copied.
    assert growing.diff().min() >= -1.1
    assert growing.iloc[-1] == pytest.approx(WHOLE, rel=0.01)


BY_HAND = """
import torch.nn.functional as F
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    with {context}:
        F.mse_loss(model(torch.randn(8, 512, device=device)), {target}).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loop_by_hand_is_measured(lab: Lab) -> None:
    cell = BY_HAND.format(context="torch.enable_grad()", target="torch.zeros(8, 512)")
    run = lab.train("raw", cell, live=False)
    names = ["parameters", "gradients", "optimizer_state", "master_parameters"]
    for rank in (0, 1):
        found = (run.memory.loc[rank, names] / MIB).tolist()
        assert found == pytest.approx([WHOLE, WHOLE, 2 * WHOLE, 0], rel=0.01)
    comm = run.comm.loc[(0, "all_reduce")]
    assert comm["count"] == 2 * NUM_LAYERS
    assert comm["wire_bytes"] / MIB == pytest.approx(WHOLE, rel=0.01)
    assert math.isnan(comm["seconds"]), "none is waited for"
    assert run.theory == {}
    shown = to_read(lab.compare(run.name))
    assert shown["comm_seconds"].tolist() == ["-"], "not known, and not 0"
    assert "sent (MiB)" in shown
    assert "wire_bytes_theory" not in shown
    assert not any(run.collector.measurements[rank][0].models for rank in (0, 1))


def test_all_optimizers_of_a_loop_by_hand_are_measured(lab: Lab) -> None:
    """As a GAN has; and those of each epoch, as some make, are the first again."""
    run = lab.train(
        "raw",
        """
one, other = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
for epoch in range(3):
    optimizers = [
        torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
    ]
    for model, optimizer in zip((one, other), optimizers):
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer, optimizers
""",
        live=False,
    )
    one = 4 * (256 * 256 + 256)
    assert run.num_steps == 3
    for rank in (0, 1):
        found = run.memory.loc[rank]
        assert found["parameters"] == pytest.approx(2 * one, rel=0.01)
        assert found["optimizer_state"] == pytest.approx(2 * one, rel=0.01)


TWO_OPTIMIZERS = """
from torch.utils.data import TensorDataset

one, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
first = torch.optim.Adam(one.parameters())
second = torch.optim.Adam(other.parameters())
data = TensorDataset(torch.randn(80, 64))
one, first, loader = prepare(one, first, data, batch_size=8)
other, second, _ = prepare(other, second, data, batch_size=8)
for step, (x,) in enumerate(loader):
    one(x).square().mean().backward()
    first.step()
    first.zero_grad()
    if {condition}:
        other(x).square().mean().backward()
        second.step()
        second.zero_grad()
"""


@pytest.mark.parametrize(
    ("condition", "num_sent"), [("True", 64 * 65 + 8 * 65), ("step % 2", 64 * 65)]
)
def test_a_step_ends_when_all_optimizers_have_stepped(
    lab: Lab, condition: str, num_sent: int
) -> None:
    """Or those that do before the next batch: the third step has the first alone."""
    code = TWO_OPTIMIZERS.replace("{condition}", condition).replace("80", "40")
    run = lab.train("ddp", code, live=False)
    for rank in (0, 1):
        assert run.comm.loc[(rank, "all_reduce"), "wire_bytes"] == 4 * num_sent
    phases = run.step_memory["phase"].to_numpy()
    assert (phases == "backward").any()
    assert (phases == "step").any()


def test_a_model_that_is_frozen_in_the_step_of_another_is_measured(lab: Lab) -> None:
    """As a critic is while an actor is trained."""
    code = TWO_OPTIMIZERS.replace("{condition}", "True").replace(
        "        second.step()",
        "        one.requires_grad_(False)\n"
        "        second.step()\n"
        "        one.requires_grad_(True)",
    )
    run = lab.train("ddp", code, live=False)
    size = 4 * (64 * 65 + 8 * 65)
    assert run.buckets["num_bytes"].sum() == size
    assert run.theory["gradients"] == run.theory["wire_bytes"] == size


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("begins", [0, 5, 100], ids=["all", "later", "never"])
def test_theory_is_that_of_what_is_trained_now(
    lab: Lab, strategy: str, begins: int
) -> None:
    """Of parameters that the loop freezes, and unfreezes, none or all have a part."""
    code = f"""
from torch.utils.data import TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
model[0].requires_grad_({begins} == 0)
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(80, 64))
model, optimizer, loader = prepare(model, optimizer, data, batch_size=8)
for step, (x,) in enumerate(loader):
    if step == {begins}:
        model[0].requires_grad_(True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    run = lab.train(strategy, code, live=False)
    for part in ("parameters", "gradients", "optimizer_state"):
        found = run.memory[part].max()
        assert found == pytest.approx(run.theory[part], rel=0.02), part


def test_gradients_on_their_way_to_a_bucket_count_once(lab: Lab) -> None:
    run = lab.train(
        "raw",
        """
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
""",
        live=False,
    )
    assert run.memory["gradients"].tolist() == [4 * 4 * 64 * 65] * 2


def test_a_loop_without_an_optimizer_is_noted(lab: Lab) -> None:
    code = """
model = torch.nn.Linear(4, 1)
for step in range(3):
    model.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    {log}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
"""
    run = lab.train("raw", code.format(log=""), live=False)
    assert run.memory.empty
    assert run.notes == [NO_STEPS]
    run = lab.train("raw", code.format(log="log(loss=loss.item())"), live=False)
    assert not run.notes
    assert len(run.history) == 6


AFTER_A_LOOP = """
import gc, time, weakref
from labkit import timeouts
from labkit.compat.torch import current_dispatch_mode

usual, timeouts.GIVE_UP_S = timeouts.GIVE_UP_S, 0.01
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
was_measured = current_dispatch_mode() is not None
freed = weakref.ref(optimizer)
del model, optimizer
gc.collect()
is_freed = freed() is None
probe = current_dispatch_mode()
began = time.perf_counter()
while not probe.has_given_up and time.perf_counter() - began < 60:
    torch.ones(1).add(1)
given_up = probe.has_given_up
timeouts.GIVE_UP_S = usual
"""


def test_what_comes_after_a_loop_by_hand_is_not_measured(lab: Lab) -> None:
    """The third step would be: the cell goes on without one."""
    lab.train("raw", AFTER_A_LOOP, live=False)
    for name in ("was_measured", "is_freed", "given_up"):
        assert lab.pull(name, "all") == [True, True], name


def test_a_step_without_a_backward_pass_has_activations(lab: Lab) -> None:
    run = lab.train(
        "raw",
        """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(512, 64)

def loss_of(values):
    return torch.func.functional_call(model, values, (x,)).square().mean()

for _ in range(4):
    found = torch.func.grad(loss_of)(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    optimizer.step()
    optimizer.zero_grad()
""",
        live=False,
    )
    least = 512 * 64 * 4  # the output of one of its layers
    assert (run.memory["activations_peak"] >= least).all()
    assert (run.memory["gradients"] == 4 * (64 * 64 + 64)).all()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            "import threading\n"
            "thread = threading.Thread(target=train)\nthread.start(); thread.join()",
            "taken in a thread",
        ),
        (
            "from torch.utils.flop_counter import FlopCounterMode\n"
            "with FlopCounterMode(display=False): train()",
            "a TorchDispatchMode of the cell's own",
        ),
    ],
)
def test_why_no_step_is_measured_is_said(lab: Lab, call: str, why: str) -> None:
    run = lab.train(
        "raw",
        f"""
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(4):
        model(torch.ones(4, 8)).mean().backward()
        optimizer.step()
{call}
""",
        live=False,
    )
    assert run.memory.empty
    assert any(why in note for note in run.notes), run.notes


def test_state_in_lists_is_counted() -> None:
    """As LBFGS keeps it."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = sum(each.numel() for each in optimizer_tensors(optimizer))
    assert found >= 4 * 1000


def test_a_mode_of_a_loop_by_hand_is_left_alone(lab: Lab) -> None:
    """It is entered and left in every step, with ours on neither side of it."""
    mode = """
from torch.utils.flop_counter import FlopCounterMode
flops = []
class Counting(FlopCounterMode):
    def __exit__(self, *args):
        flops.append(self.get_total_flops())
        return super().__exit__(*args)
"""
    lab.run(mode)
    cell = BY_HAND.format(
        context="Counting(display=False)", target="torch.zeros(8, 512)"
    )
    run = lab.train("raw", cell, live=False)
    assert run.state == "finished"
    assert run.memory.empty
    lab.run(
        "from labkit.compat.torch import current_dispatch_mode\n"
        "assert current_dispatch_mode() is None\n"
        "assert len(flops) == 4 and len(set(flops)) == 1, flops"
    )


def test_ranks_that_start_collectives_in_another_order_do_not_hang(lab: Lab) -> None:
    """Rank 1 starts its all-reduce once rank 0, which has started its own, says so."""
    cell = """
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        dist.recv(torch.zeros(4), 0)
    work = dist.all_reduce(model.weight.grad, async_op=True)
    if rank == 0:
        dist.send(torch.zeros(4), 1)
    work.wait()
    optimizer.step()
    optimizer.zero_grad()
"""
    run = lab.train("raw", cell, live=False, timeout=30)
    assert run.state == "finished"
    assert run.comm.loc[(0, "all_reduce"), "count"] == 1


OF_OTHERS = """
import threading
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(64, 8)
net, other = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
sgd, adam = torch.optim.SGD(net.parameters()), torch.optim.Adam(other.parameters())
step = {step}
for _ in range(4):
    F.mse_loss(net(x), x[:, :1]).backward()
    F.mse_loss(other(x), x[:, :1]).backward()
    step()
    sgd.zero_grad()
    adam.zero_grad()
found = [p.detach().clone() for p in (*net.parameters(), *other.parameters())]
"""
STEPS_OF_OTHERS = {
    "two optimizers": "lambda: (sgd.step(), adam.step())",
    "in a thread": "lambda: [(t := threading.Thread(target=o.step)).start() or t.join()"
    " for o in (sgd, adam)]",
    "compiled": "torch.compile(lambda: (sgd.step(), adam.step()))",
}


@pytest.mark.parametrize(
    "name", release_but(STEPS_OF_OTHERS, *list(STEPS_OF_OTHERS)[:2])
)
def test_to_measure_a_loop_by_hand_changes_nothing_in_it(lab: Lab, name: str) -> None:
    """However it takes its steps: compiled code restores torch's state as it was
    before, and a mode that was entered within it would stay half."""
    cell = OF_OTHERS.format(step=STEPS_OF_OTHERS[name])
    run = lab.train("raw", cell, live=False, timeout=100)
    lab.run("measured = found")
    lab.run(cell)  # a cell in which nothing is measured
    lab.run("assert all(map(torch.equal, measured, found))")
    moments = run.step_memory
    if name == "two optimizers":  # the step is a whole one, with both backward passes
        assert set(moments["phase"]) == {"forward", "backward", "step"}
        assert moments["optimizer_state"].max() >= 2 * 9 * 4
        assert moments["gradients"].max() >= 2 * 9 * 4
    else:
        assert moments.empty


@pytest.mark.release
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_compiled_step_of_a_prepared_loop_is_not_measured(
    lab: Lab, strategy: str
) -> None:
    cell = CELL.replace(
        "for x, y", "step = torch.compile(lambda: optimizer.step())\nfor x, y"
    )
    run = lab.train(
        strategy, cell.replace("    optimizer.step()", "    step()"), live=False
    )
    assert run.state == "finished"
    assert run.memory.empty
    lab.run("torch.ones(2) + 1")
