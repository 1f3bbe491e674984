"""Refuses, or notes, what a loop does that its strategy cannot make right."""

import contextlib
import functools
import io
import os
import pickle
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from labkit.checkpoint.atomic_file import replacing
from labkit.checks import UnsupportedLoopError
from labkit.checks import short_repr
from labkit.compat.torch import held_by
from labkit.compat.torch import tree_leaves
from labkit.rank.code.own_gradients import gradient_use
from labkit.rank.code.own_gradients import group_gradient_use
from labkit.rank.code.own_gradients import group_value_use
from labkit.rank.code.own_gradients import step_value_use
from labkit.rank.code.rank_guards import lonely_use
from labkit.rank.loop.arguments import WITH_ITS_WEIGHTS
from labkit.rank.loop.arguments import check_prepared
from labkit.rank.loss.gradient_hooks import OF_A_PART
from labkit.rank.loss.gradient_hooks import TOO_LATE
from labkit.rank.loss.hooks import LossHooks
from labkit.strategies import Strategy
from labkit.strategies.autograd.backward import Roots
from labkit.strategies.mesh.sizes import DATA_PARALLEL
from labkit.strategies.model.states import parameters_of
from labkit.strategies.prepared import Prepared
from labkit.strategies.relay.parameters import pipeline_of
from labkit.strategies.unsupported import check_supported
from labkit.train_options import TrainOptions

WHOLE_STATE = (
    "save_checkpoint(folder), or on all ranks state = get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict, which rank 0 then saves"
)
SAVED_PARTS = (
    "torch.save got parameters in parts (DTensors), as model.state_dict() has them "
    "under {strategy}. Such a file loads only in a group of as many ranks, each the "
    "file that it wrote itself; of one that all ranks write, one rank's part is left. "
    f"To keep the whole model: {WHOLE_STATE}"
)
SAVED_MODULE = (
    "torch.save(model) pickles the model itself, as this rank has it, and with it what "
    f"prepare has put into it. Save the state of the whole model: {WHOLE_STATE}"
)


ALREADY = (
    "parameters of this model were already prepared in this cell, and a parameter can "
    "have only one optimizer. For several optimizers, pass prepare one with a "
    "parameter group for each part. For other batches (another size, a next task), "
    "prepare once, with a DataLoader whose sampler or batch_sampler the loop changes "
    "between epochs. "
    "For another phase (a new optimizer, layers unfrozen or added), build the model "
    "again with its weights, on all ranks, and prepare that with an optimizer of its "
    f"own: {WITH_ITS_WEIGHTS}"
)

IN_LAYERS = (
    "{kind}, which was not passed to prepare, trains tensors that the model has as "
    "attributes and not as parameters. Where the model's forward computes with them, "
    "each rank has the gradient of its own layers alone under {strategy}, unlike one "
    "process. Make them torch.nn.Parameter and give prepare one optimizer with a "
    "parameter group for each part, or use single"
)

of_former_runs: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers that runs which are over have prepared."""


class LoopChecks:
    """The checks of one run: before a model is prepared, and in the loop."""

    def __init__(
        self,
        strategy: Strategy,
        options: TrainOptions,
        *,
        world_size: int,
        prepared: Callable[[], Sequence[Prepared]],
        batch: Callable[[], int | None],
        note: Callable[[str], None],
    ) -> None:
        """`prepared()` are the models of the run so far; `batch()` is the number of the
        global batch that the loop has, None in one over data of its own."""
        self._strategy = strategy
        self._options = options
        self._world_size = world_size
        self._prepared = prepared
        self._batch = batch
        self._first_batch: Any = WeakTensorKeyDictionary()
        """In which one a parameter was first stepped by an optimizer that `prepare` did
        not return, by the first parameter of each."""
        self._note = note
        self._has_noted_hook = False

    def install(self, hooks: LossHooks) -> None:
        """Have `hooks` call them, where several ranks or microbatches share a step, or
        a step is more than the optimizer's."""
        options = self._options
        if self._strategy.is_by_hand:
            return
        if (
            not self._is_alone
            or options.clip is not None
            or options.precision == "fp16"
        ):
            hooks.check_optimizer = self.check_optimizer
        if self._is_alone:
            return
        hooks.check_gradients_of = self.check_gradients_of
        hooks.check_gradients_within = self.check_gradients_within
        hooks.check_inputs = self.check_inputs
        hooks.check_graph = self.check_graph
        hooks.check_scaler = self.check_scaler

    @property
    def _is_alone(self) -> bool:
        """Whether each batch is one process's, and gives a step."""
        return self._strategy.is_single and self._options.accumulate == 1

    @contextlib.contextmanager
    def watching_saves(self) -> Iterator[None]:
        """Check what the cell gives to `torch.save`, and write a file that several
        ranks may write so that none reads a part of it."""
        save = torch.save

        @functools.wraps(save)
        def checked(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            leaves = tree_leaves(obj)
            is_file = not isinstance(f, io.BytesIO)  # a copy for this rank itself
            if is_file and any(isinstance(each, DTensor) for each in leaves):
                self._note(SAVED_PARTS.format(strategy=self._strategy.name))
            ours = {m for each in self._prepared() for m in each.module.modules()}
            has_ours = any(
                each in ours for each in leaves if isinstance(each, nn.Module)
            )
            if has_ours and self._strategy.is_sharded:
                raise UnsupportedLoopError(SAVED_MODULE)
            is_path = isinstance(f, str | os.PathLike)
            is_shared = is_path and self._world_size > 1
            try:
                with replacing(f) if is_shared else contextlib.nullcontext(f) as target:
                    save(obj, target, *args, **options)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                if has_ours:
                    raise UnsupportedLoopError(SAVED_MODULE) from error
                raise

        torch.save = checked
        try:
            yield
        finally:
            torch.save = save

    def check_prepare(
        self, model: Any, optimizer: Any, unnamed: Sequence[Any], code: str
    ) -> None:
        """ValueError and UnsupportedLoopError for what `prepare` cannot take, or what
        `code`, the cell, cannot do after it."""
        if self._strategy.is_by_hand:
            raise ValueError(
                f"{self._strategy.name} leaves everything to the cell; for prepare and "
                "fit use another strategy, for example %%dist_train ddp"
            )
        if unnamed:
            raise ValueError(
                f"prepare got {short_repr(unnamed[0])} after the dataset; pass it by "
                "name, for example prepare(model, optimizer, dataset, batch_size=64)"
            )
        self.check_first(model)
        pipeline = pipeline_of(model) if isinstance(model, nn.Module) else None
        if pipeline is not None and pipeline.team.size > self._world_size:
            raise ValueError(  # to have it whole asks all of them
                "model is in stages on ranks that do not all train under "
                f"{self._strategy.name}. Build it again; to go on with its weights, in "
                f"a %%dist cell before, on all ranks: {WITH_ITS_WEIGHTS}"
            )
        check_prepared(model, optimizer)
        mesh = self._strategy.mesh_sizes(self._options.mesh, self._world_size)
        check_supported(
            model,
            self._strategy,
            num_ranks=self._world_size,
            precision=self._options.precision,
            has_replicas=any(axis in DATA_PARALLEL for axis in mesh),
        )
        self.check_ownership(model, optimizer)
        self.check_rank_guards(code)
        self.check_groups(code)
        self.check_step_value(optimizer, code)
        if self._strategy.server and self._world_size > 1:
            self._note_gradients(code)

    def _note_gradients(self, code: str) -> None:
        if use := gradient_use(code):
            self._note(
                f"{use}: under {self._strategy.name} a worker has the gradient of its "
                "own samples, and the servers average those of all workers, so what "
                "the loop computes of it is not what one process does. To clip, give "
                "--clip NORM, which plots the norm as well; for all else use ddp"
            )

    def check_first(self, model: Any) -> None:
        """UnsupportedLoopError where parameters of the model were prepared in this run.

        Before it is asked what the strategy has made of them then.
        """
        ours = self._prepared_ids()
        if isinstance(model, nn.Module) and any(
            id(parameter) in ours for parameter in model.parameters()
        ):
            raise UnsupportedLoopError(ALREADY)

    def check_ownership(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """UnsupportedLoopError unless the optimizer's parameters are the model's."""
        if self._prepared() and self._options.precision == "fp16":
            raise UnsupportedLoopError(
                "--precision fp16 scales the loss of one model; with several, as in a "
                "GAN, use --precision bf16"
            )
        if self._prepared() and self._options.accumulate > 1:
            raise UnsupportedLoopError(
                "--accumulate is for one model: with several, as in a GAN, each has to "
                "see the others after their step, and between microbatches there is no "
                "step. Leave out --accumulate, or put the models into one "
                "torch.nn.ModuleList with one optimizer"
            )
        owned = {id(parameter) for parameter in model.parameters()}
        others = [p for p in parameters_of(optimizer) if id(p) not in owned]
        shapes = [tuple(parameter.shape) for parameter in others]
        if shapes and not self._strategy.is_single:
            raise UnsupportedLoopError(
                "the optimizer has parameters that are not the model's "
                f"({len(shapes)}, the first of shape {shapes[0]}), so "
                f"{self._strategy.name} would not synchronize them; put both modules "
                "into one and prepare that: both = torch.nn.ModuleList([model, other])"
            )

    def check_rank_guards(self, code: str) -> None:
        strategy = self._strategy
        if self._world_size == 1 or not strategy.is_partitioned:
            return
        if use := lonely_use(code, gradients_alone=not strategy.is_sharded):
            raise UnsupportedLoopError(
                f"{use} runs on one rank only, but under {self._strategy.name} each "
                "rank has only a part of what it needs, so that rank would wait "
                "forever for the others. Run it on all ranks and print or save the "
                "result on one; save_checkpoint(folder), called on all ranks, saves "
                "the whole model"
            )

    def check_lonely_draws(self, code: str) -> None:
        """UnsupportedLoopError where `code` takes batches on one rank alone: each pass
        over a loader is one of all ranks."""
        if self._world_size > 1 and (use := lonely_use(code, of_loader=True)):
            raise UnsupportedLoopError(
                f"{use} takes batches of the loader on one rank only, and its passes "
                "are those of all ranks. Take them on all ranks, or look at "
                "loader.dataset"
            )

    def check_groups(self, code: str) -> None:
        """UnsupportedLoopError where `code` looks for gradients or parameters in the
        optimizer's groups, and the strategy has none there."""
        if not self._strategy.has_own_gradients:
            return
        if use := group_gradient_use(code):
            raise UnsupportedLoopError(
                f"{use} reads gradients of the parameters in optimizer.param_groups, "
                f"and under {self._strategy.name} these are the parts that this rank "
                "updates, without gradients: nothing would be clipped or changed. Take "
                "the parameters from model.parameters(), or give --clip NORM"
            )
        if use := group_value_use(code):
            raise UnsupportedLoopError(
                f"{use} uses the parameters in optimizer.param_groups, and under "
                f"{self._strategy.name} these are copies of the parts that this rank "
                "updates, not the model's parameters: what is set in them is lost. "
                "Take the parameters from model.parameters(), or use ddp"
            )

    def check_step_value(self, optimizer: torch.optim.Optimizer, code: str) -> None:
        """UnsupportedLoopError where `code` uses what a step of the loop's own class
        returns, and the step is taken elsewhere, or part by part."""
        kind, strategy = type(optimizer), self._strategy
        is_elsewhere = strategy.has_own_gradients or strategy.server is not None
        is_torchs = kind.__module__.startswith("torch.optim")
        if is_elsewhere and not is_torchs and (use := step_value_use(code)):
            raise UnsupportedLoopError(
                f"{use} uses what {kind.__name__}.step returns, and under "
                f"{strategy.name} labkit calls step, not the loop, and its return "
                "value is lost. Compute the value in the loop, or use ddp"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that `prepare` did not return is about to step."""
        kind, strategy = type(optimizer).__name__, self._strategy.name
        if not self._prepared() and self._strategy.is_single:
            return
        if not self._prepared() and optimizer in of_former_runs:
            raise UnsupportedLoopError(
                "the cell trains on with what an earlier run prepared, and does not "
                f"call prepare, so nothing that %%dist_train {strategy} says would "
                "hold for it; begin the cell with model, optimizer, loader = "
                "prepare(model, optimizer, loader), of what was prepared, or use "
                "%%dist_train raw or %%dist, under which it trains on as it is"
            )
        if not self._prepared():
            raise UnsupportedLoopError(
                f"the cell trains without prepare, so {strategy} distributes nothing "
                "and every rank would train a model of its own; call model, optimizer, "
                "loader = prepare(model, optimizer, dataset, batch_size=B) in this "
                "cell, or use %%dist_train raw, where the cell does all of it"
            )
        if any(optimizer is each.optimizer for each in self._prepared()):
            raise UnsupportedLoopError(
                f"the loop steps the {kind} that was passed to prepare instead of the "
                "optimizer that prepare returned; write model, optimizer, loader = "
                "prepare(model, optimizer, ...) and call step() on that optimizer"
            )
        for each in self._prepared():
            if any(optimizer is own for own in vars(each.optimizer).values()):
                each.begin_own_step(kind)
                return
        if self._is_alone:
            return
        ours = self._prepared_ids()
        if any(id(parameter) in ours for parameter in parameters_of(optimizer)):
            raise UnsupportedLoopError(
                f"{kind} has parameters of a model that was prepared with another "
                f"optimizer, and under {strategy} only that one can step them; give "
                "prepare one optimizer with a parameter group for each part"
            )
        # Of layers that are split it may have parameters, as they were before.
        is_whole = all(
            each.peers.size == 1 and each.division is None for each in self._prepared()
        )
        if is_whole and self._options.accumulate == 1:  # every rank has whole batches
            if self._strategy.has_whole_parameters and self._holds_trained(optimizer):
                self._note(IN_LAYERS.format(kind=kind, strategy=strategy))
            return
        is_plain = self._options.accumulate == 1 and self._options.precision != "fp16"
        if is_plain and optimizer in of_former_runs:
            return  # its gradients are whole
        batch = self._batch()
        parameter = next(iter(parameters_of(optimizer)))
        first = self._first_batch.setdefault(parameter, batch)
        if batch is not None and batch == first:
            return  # so far it is of this batch alone, as that of an attack's noise
        self._note(
            f"{kind} was not passed to prepare, so {strategy} does not synchronize its "
            "parameters: every rank trains its own copy, with the data that it has. "
            "With its part of a batch that is unlike one process: call prepare once "
            "for each model and its optimizer. With the same data on all ranks the "
            "copies are alike"
        )

    def _holds_trained(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a prepared model has what this optimizer trains as plain attributes
        of its layers."""
        trained = set(map(id, parameters_of(optimizer)))
        return any(
            id(value) in trained
            for each in self._prepared()
            for module in each.module.modules()
            for value in held_by(module)
        )

    def check_gradients_of(self, inputs: Roots, create_graph: bool) -> None:
        strategy, has_microbatches = self._strategy, self._options.accumulate > 1
        ours = self._prepared_ids()
        if any(id(each) in ours for each in inputs):
            raise UnsupportedLoopError(
                "torch.autograd.grad returns the gradients of this rank and microbatch "
                f"alone, which {strategy.name} does not average; use "
                + (
                    "%%dist_train single without --accumulate: with create_graph=True "
                    "the loss is of these gradients, and none of the batch's"
                    if create_graph
                    else "loss.backward() and read parameter.grad, which is that of "
                    "the whole batch, or use %%dist_train raw"
                )
            )
        is_freed = not strategy.differentiates_twice or (
            strategy.is_sharded and has_microbatches
        )
        if create_graph and is_freed and self._prepared():
            raise UnsupportedLoopError(
                "torch.autograd.grad(..., create_graph=True) makes the next backward "
                f"pass differentiate the model a second time, and {strategy.name} does "
                "not keep what that needs on every rank; use ddp, zero1 or zero2"
            )

    def check_gradients_within(self, inputs: Roots) -> None:
        ours = self._prepared_ids()
        is_gathered = self._strategy.is_sharded and "dp_shard" in self._strategy.axes
        if is_gathered and any(id(each) in ours for each in inputs):
            raise UnsupportedLoopError(
                "a backward pass calls torch.autograd.grad for parameters of the "
                "model, for example in a torch.autograd.Function of yours, and "
                f"{self._strategy.name} gathers a layer's parameters for its own "
                "passes alone. Compute it plainly in forward, with "
                "--activation-checkpointing to save memory, or use ddp, zero1 or zero2"
            )

    def see_hook(self, parameter: nn.Parameter, is_after: bool) -> None:
        """The loop is about to register a hook for the gradient of a parameter, which
        is called after this is in `parameter.grad`, or before."""
        for each in self._prepared():
            named = each.module.named_parameters()
            name = next((name for name, p in named if p is parameter), None)
            if name is None:
                continue
            each.check_hook(name)
            if is_after and self._strategy.has_own_gradients:
                name = self._strategy.name
                raise UnsupportedLoopError(TOO_LATE.format(strategy=name))
            self.note_hook(name, is_of_part=each.gives_part_of_gradient(parameter))

    def note_hook(self, name: str, *, is_of_part: bool) -> None:
        """A parameter has a hook for its gradient, which gets a part of that, or all of
        it. Once: there may be one for each parameter."""
        if is_of_part and not self._has_noted_hook:
            self._has_noted_hook = True
            self._note(OF_A_PART.format(name=name))

    def check_inputs(self, inputs: Roots) -> None:
        """Check a backward pass that gives gradients to `inputs` alone."""
        ours = self._prepared_ids()
        if (
            self._world_size > 1
            and not self._strategy.has_own_gradients
            and any(id(each) in ours for each in inputs)
        ):
            raise UnsupportedLoopError(
                "backward(inputs=...) names some parameters of the model, and "
                f"{self._strategy.name} averages those of a whole backward pass. Set "
                "requires_grad_(False) on the others for that pass, or use zero1 or "
                "zero2"
            )

    def check_graph(self) -> None:
        is_elsewhere = self._world_size > 1 or self._strategy.server is not None
        if is_elsewhere and self._prepared():
            raise UnsupportedLoopError(
                "backward(create_graph=True) asks for gradients that can be "
                f"differentiated again; those that {self._strategy.name} averages over "
                "the ranks cannot. Use torch.autograd.grad(..., create_graph=True) "
                "with respect to the inputs, or %%dist_train single"
            )

    def check_scaler(self) -> None:
        is_partitioned = self._strategy.has_own_gradients and bool(self._prepared())
        if is_partitioned or self._options.accumulate > 1:
            why = (
                f"needs whole gradients, which {self._strategy.name} partitions"
                if is_partitioned
                else "steps after every microbatch, which --accumulate does not"
            )
            raise UnsupportedLoopError(
                f"torch.amp.GradScaler {why}; leave it out and give --precision fp16, "
                "which scales the loss and skips steps that overflow"
            )

    def _prepared_ids(self) -> set[int]:
        return {
            id(parameter)
            for each in self._prepared()
            for parameter in (*each.given_parameters, *each.module.parameters())
        }
