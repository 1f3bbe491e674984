"""What labkit offers inside a training cell: `prepare`, `fit` and `log`."""

import _thread
import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

from labkit.checks import UnsupportedLoopError
from labkit.checks import check_count
from labkit.checks import check_flag
from labkit.checks import check_step
from labkit.compat.torch import no_dispatch
from labkit.rank.data.dealing import Dealer
from labkit.rank.data.dealing import GlobalBatches
from labkit.rank.data.dealing import Stream
from labkit.rank.data.dealing import shard_dataset
from labkit.rank.data.evaluation import LossFunction
from labkit.rank.data.evaluation import Scores
from labkit.rank.data.evaluation import evaluate
from labkit.rank.data.loader import TWICE_AT_ONCE
from labkit.rank.data.loader import RankLoader
from labkit.rank.data.loader import Weigh
from labkit.rank.data.loader import is_in_main_thread
from labkit.rank.data.sharing import as_given
from labkit.rank.loop.arguments import check_reduction
from labkit.rank.loop.arguments import functions_of_fit
from labkit.rank.loop.early_stop import EarlyStop
from labkit.rank.loop.early_stop import EarlyStops
from labkit.rank.loop.early_stop import StopRule
from labkit.rank.loop.early_stop import number_of
from labkit.rank.loop.early_stop import rule_of_fit
from labkit.rank.loop.loop_checks import LoopChecks
from labkit.rank.loop.run_records import RESERVED
from labkit.rank.loop.run_records import RunRecords
from labkit.rank.loop.step_data import StepData
from labkit.rank.loss.gradient_hooks import hooked_parameters
from labkit.rank.loss.gradient_hooks import watching_gradient_hooks
from labkit.rank.loss.hooks import LossHooks
from labkit.rank.measuring.memory import memory_reader
from labkit.rank.measuring.oom_report import Forecastable
from labkit.rank.measuring.oom_report import bare_copy
from labkit.rank.measuring.oom_report import plain_copy
from labkit.rank.steps.former_runs import leave_run
from labkit.rank.steps.loop_events import LoopEvents
from labkit.rank.steps.observers import Observer
from labkit.rank.steps.observers import ReplicaObserver
from labkit.rank.steps.observers import StepSampler
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.rank.steps.optimizer import watching_zero_grad
from labkit.rank.telemetry.emitter import Emitter
from labkit.rank.telemetry.exceptions import run_all
from labkit.rank.training import notes
from labkit.rank.training.cell_checkpoints import Checkpoints
from labkit.rank.training.loaded_states import LoadedStates
from labkit.rank.training.resume import RunCheckpointer
from labkit.rank.training.resume import seed_everything
from labkit.records import BEST_FOLDER
from labkit.records import CHECKPOINT
from labkit.records import NO_STEPS
from labkit.records import TRAINING_NAMES
from labkit.records import CheckpointPlan
from labkit.records import Note
from labkit.strategies import Strategy
from labkit.strategies.autograd.backward import release_former
from labkit.strategies.autograd.exports import refuse_exports
from labkit.strategies.mesh.device_mesh import build_mesh
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.mesh.peers import peers_on
from labkit.strategies.mesh.peers import team_on
from labkit.strategies.mesh.roles import Roles
from labkit.strategies.model.gradients import owner_of
from labkit.strategies.model.materialize import FROM_META
from labkit.strategies.model.materialize import check_values
from labkit.strategies.model.materialize import is_from_meta
from labkit.strategies.model.materialize import until_set
from labkit.strategies.model.shards import checking_loads
from labkit.strategies.model.writes import watch_forward
from labkit.strategies.options import BatchNorm
from labkit.strategies.options import has_own_statistics
from labkit.strategies.options import keep_stand_ins_out
from labkit.strategies.options import watch_plain_batchnorm
from labkit.strategies.parallelize import change_layers
from labkit.strategies.parallelize import parallelize
from labkit.strategies.prepared import Prepared
from labkit.train_options import TrainOptions


class Session:
    """One rank's side of one run."""

    read_code: Callable[[], str] = str
    """Returns the cell's text; "" where that is not known."""
    forecastable: Forecastable | None = None
    """Of the model that was prepared last."""
    has_failed = False
    """Whether the cell has ended with an error."""
    refusal: UnsupportedLoopError | None = None
    """Of what a thread of the cell does; the next signal raises it in the cell."""
    _is_preparing = False
    """Whether code of the cell's runs to be tried: what it logs is of no step."""

    def __init__(
        self,
        strategy: Strategy,
        emitter: Emitter,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        seed: int,
        options: TrainOptions,
        folder: str | None = None,
        checkpoints: CheckpointPlan | None = None,
        report: Callable[[Any], None] = lambda measured: None,
        observers: Sequence[Observer] = (),
        profiled: Container[int] = (),
        roles: Roles | None = None,
    ) -> None:
        """`world_size` is that of the ranks that train; `roles` says which others serve
        them, if any do. In `profiled` steps nothing is measured or compared: that
        would be in the profile."""
        self.strategy = strategy
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.seed = seed
        self.options = options
        self._roles = roles
        self._report = report
        self._noted: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._checkpoints = Checkpoints(self.prepared)
        self._early_stops = EarlyStops(
            None if folder is None else Path(folder) / BEST_FOLDER,
            mean=self._mean_of_run,
            save=self._save_best,
            restore=self._checkpoints.load_checkpoint,
            note=self.note if rank == 0 else lambda text: None,
        )
        hooks = self._loss_hooks = LossHooks()
        sampler = StepSampler(
            self._optimizers,
            device,
            noticed=hooks.optimizers,
            report=report,
            note=self.note,
            left_out=profiled,
        )
        self._records = RunRecords(
            emitter,
            memory_reader(device)
            if device.type == "cuda"
            else lambda: sampler.peak_bytes,
        )
        self._checkpointer = RunCheckpointer(
            checkpoints,
            rank=rank,
            device=device,
            seed=seed,
            on_checkpoint=lambda step: self._records.put(CHECKPOINT, step, step),
            note=self.note,
            read_code=lambda: self.read_code(),
        )
        self._data = StepData(hooks, accumulate=options.accumulate, note=self.note)
        self._checks = LoopChecks(
            strategy,
            options,
            world_size=world_size,
            prepared=self.prepared,
            batch=lambda: None if self._data.share is None else hooks.batch,
            note=self.note,
        )
        self._checks.install(hooks)
        self._replicas = ReplicaObserver(
            self._optimizers,
            report=report,
            left_out=profiled,
            num_backwards=lambda: hooks.num_backwards,
        )
        # A step that is stopped at has been saved before; it is timed last.
        self._loaded = LoadedStates(self._is_trained, lambda: self._records.num_steps)
        self._observers = [self._checkpointer, *observers, self._replicas, sampler]
        self._events = LoopEvents(
            hooks,
            self._data,
            self._records,
            observers=self._observers,
            optimizers=self._optimizers,
            stop=self._keep_state,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch the cell's loop; the same seed on every rank, so equal models."""
        seed_everything(self.seed)
        with (
            self._loss_hooks.watching(),
            watching_zero_grad(self._optimizers),
            watching_gradient_hooks(self._checks.see_hook),
            checking_loads(),
            self._loaded.watching(),
            self._checks.watching_saves(),
            warnings.catch_warnings(),
            contextlib.ExitStack() as watching,
        ):
            for observer in self._observers:
                watching.enter_context(observer.watching())
            # A 1x1 convolution's gradient, which is copied once.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view")
            try:
                yield
            finally:
                self._end()

    def finish(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """The cell ended well: keep its state, if it keeps any. Collective.

        Raises KeyboardInterrupt if `is_interrupted` becomes true meanwhile.
        """
        has_records = self._records.num_steps or self._records.has_logged
        if self._events.has_passed and not has_records:
            self.note(NO_STEPS)
        for each in self.prepared():
            each.course.finish()
        # Compared in the notebook: no rank waits here for one that is in the loop yet.
        watch = self._replicas.watch
        watch.loaded = self._loaded.number
        watch.num_copies = sum(each.course.num_copies for each in self.prepared())
        self._keep_state(is_interrupted)

    def _keep_state(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """The run ends well, or stops between two steps, on all ranks; others need not
        serve it any longer. Collective."""
        self._unite(with_optimizer=True)
        self._checkpointer.finish(self._records.num_steps, is_interrupted)
        for each in self.prepared():
            each.finish()
        if self._roles is not None:
            self._roles.dismiss_servers()

    def _unite(self, *, with_optimizer: bool = False) -> None:
        """Have one model on all ranks, for what reads it as one. Collective."""
        for each in self.prepared():
            each.unite(with_optimizer=with_optimizer)

    def _end(self) -> None:
        """Free the models; the cell's own variables may be used on.

        Every part of it is done, whichever fails; raises the first error.
        """
        num_steps = self._records.num_steps
        error = run_all(
            [
                *(partial(each.end, num_steps) for each in self._observers),
                *(each.close for each in self._observers),
                *reversed(self._undo),
                self._free_optimizers,
            ]
        )
        if error is not None:
            raise error

    def _free_optimizers(self) -> None:
        """From now on their steps are plain ones, and no part of this run."""
        self._events.end()
        for optimizer in self._optimizers:
            leave_run(optimizer)
        BatchNorm.counts_here, BatchNorm.peers = True, None
        self._undo.clear()
        self._optimizers.clear()

    @property
    def names(self) -> dict[str, Callable[..., Any]]:
        """Those that a training cell has, with what they call."""
        own = {name: getattr(self, name) for name in TRAINING_NAMES}
        return own | self._checkpoints.names

    @property
    def num_steps(self) -> int:
        """That the run has taken."""
        return self._records.num_steps

    @property
    def is_replaying(self) -> bool:
        """Whether the cell is not yet where the run was that it resumes."""
        return self._checkpointer.is_replaying

    @property
    def num_passes(self) -> int:
        """That the loop has begun, through all its loaders."""
        return self._checkpointer.num_passes

    @property
    def has_begun(self) -> bool:
        """Whether the loop has had a batch, or a backward pass, in this run; or has
        asked for a batch, which has failed."""
        hooks, passes = self._loss_hooks, self._checkpointer
        has_asked = passes.num_passes > passes.num_empty
        return has_asked or hooks.microbatch > 0 or hooks.num_backwards > 0

    def prepared(self) -> list[Prepared]:
        """What `prepare` has made in this run."""
        return [each.prepared for each in self._optimizers]

    def _is_trained(self, model: nn.Module) -> bool:
        """Whether it is one that `prepare` has returned in this run."""
        return any(model is each.module for each in self.prepared())

    @functools.cached_property
    def mesh(self) -> DeviceMesh | None:
        """All ranks of the run, along the axes of its strategy. Collective, once."""
        sizes = self.strategy.mesh_sizes(self.options.mesh, self.world_size)
        return build_mesh(sizes, self.device)

    @functools.cached_property
    def peers(self) -> Peers:
        """The ranks that share a batch."""
        if self._roles is not None:
            return self._roles.peers
        return peers_on(self.mesh, self.device)

    @functools.cached_property
    def team(self) -> Peers:
        """The ranks that train one model: these, and those with other parts of it."""
        if self._roles is not None:
            return self._roles.peers
        return team_on(self.mesh, self.device)

    def meet(self) -> None:
        """Wait for all ranks of the run. Collective."""
        self._mean_of_run(0.0, 1.0)

    def note(self, text: str) -> None:
        """Have a sentence about the cell's loop shown under the run, once."""
        if text not in self._noted:
            self._noted.add(text)
            self._report(Note(text))

    # ---- the names a cell has ----

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any] | DataLoader[Any] | None = None,
        *unnamed: Any,
        batch_size: int | None = None,
        shuffle: bool = True,
        weigh: Weigh | None = None,
        reduction: str = "mean",
    ) -> tuple[nn.Module, torch.optim.Optimizer, RankLoader]:
        """Apply the strategy of the magic line. Collective: all ranks call it.

        After it, the plain PyTorch loop is the same under every strategy; accumulation,
        clipping and precision are those of the magic line too.

        Parameters
        ----------
        model : nn.Module
            The plain module, built with the same values on every rank; also on the meta
            device. It is changed in place.
        optimizer : torch.optim.Optimizer
            Over the parameters of `model`.
        dataset : Dataset or DataLoader, optional
            The same on every rank, map-style or iterable; its samples are divided among
            the ranks. A DataLoader keeps its batch size, sampler, `collate_fn` and
            workers. Without one an error says what a loop without a loader passes.
        batch_size : int, optional
            Samples of a global batch: those of all ranks together. Left out only where
            a DataLoader has one.
        shuffle : bool, default True
            Shuffle a map-style dataset, in each epoch in another order. With False
            global batch k holds samples k*B to (k+1)*B-1, on any number of ranks. A
            DataLoader has its own order.
        weigh : callable, optional
            For a loss that is a mean over something other than the samples, such as the
            tokens that are not padding: `weigh(batch)` gives their number in a rank's
            batch, which is on the CPU.
        reduction : {"mean", "sum"}, default "mean"
            Whether the loss is a mean or a sum over the samples of a batch.

        Returns
        -------
        model : nn.Module
            The same object.
        optimizer : torch.optim.Optimizer
            Steps as the strategy does; `optimizer.held_back` says whether the last
            `step()` waits for further microbatches.
        loader : RankLoader
            Yields this rank's part of every global batch, on its device: see
            `RankLoader.share`, `RankLoader.group` and `RankLoader.num_steps`.

        Raises
        ------
        ValueError
            For arguments that cannot be used together, or under this strategy; as
            UnsupportedLoopError with what to write instead. The model is unchanged.

        Examples
        --------
        >>> model, optimizer, loader = prepare(model, optimizer, dataset, batch_size=64)
        >>> for x, y in loader:
        ...     loss_fn(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        if self._events.has_ended:
            raise UnsupportedLoopError(
                "this prepare belongs to a run that has ended; call prepare in a cell "
                "that begins with %%dist_train STRATEGY"
            )
        if isinstance(optimizer, PreparedOptimizer):  # of an earlier run
            optimizer = optimizer.prepared.optimizer
        dataset = as_given(dataset)
        code = self.read_code()
        self._checks.check_prepare(model, optimizer, unnamed, code)
        unset = check_values(model, optimizer)
        check_flag("shuffle", shuffle)
        check_reduction(reduction, weigh)
        dealer = self._dealer(model, is_sum=reduction == "sum")
        loader, batches = shard_dataset(
            dataset, dealer, batch_size=batch_size, shuffle=shuffle, seed=self.seed
        )
        self._checks.check_lonely_draws(code)
        # From here on the model changes.
        step = Forecastable(
            plain_copy(model), bare_copy(optimizer), batches.batch_size, self.options
        )
        prepared = self._parallelized(model, optimizer)
        self._hook(prepared, step, unset)
        self._replicas.watch.group = prepared.replica_group
        self._replicas.watch.place = self.peers.rank
        self._loss_hooks.scale = prepared.scale
        self._data.weigh_losses(dealer, is_mean_of_samples=weigh is None)
        stepping = self._stepping(model, prepared)
        for text in notes.of_text(
            code,
            self.strategy,
            self.options,
            num_ranks=self.peers.size,
            num_alike=self.team.size // self.peers.size,
            is_sum=dealer.is_sum,
            is_loader=isinstance(dataset, DataLoader),
        ):
            self.note(text)
        # From here on ranks with samples of their own differ: dropout falls on other
        # units on each.
        seed_everything(self.seed + self.peers.rank)
        rank_loader = self._rank_loader(loader, batches, weigh)
        self._checkpointer.add(stepping, rank_loader)
        self._early_stops.clear()  # what they have seen is of another model
        self._records.resume(self._checkpointer.first_step)
        return model, stepping, rank_loader

    def fit(
        self,
        model: nn.Module,
        dataset: Dataset[Any] | DataLoader[Any],
        loss_fn: LossFunction,
        *,
        optimizer: torch.optim.Optimizer,
        batch_size: int | None = None,
        epochs: int = 1,
        validate: Dataset[Any] | DataLoader[Any] | None = None,
        metrics: Mapping[str, LossFunction] | None = None,
        shuffle: bool = True,
        weigh: Weigh | None = None,
        reduction: str = "mean",
        patience: int | None = None,
        min_delta: float = 0.0,
        monitor: str | None = None,
        mode: str = "min",
        restore_best: bool = False,
    ) -> None:
        """Train `model` with the plain loop, on data divided as by `prepare`.

        Collective: all ranks call it.

        Parameters
        ----------
        model, dataset, optimizer, batch_size, shuffle, weigh, reduction
            As for `prepare`.
        loss_fn : callable
            `loss_fn(model(x), y)` is the loss of a batch `(x, y)`, a scalar, and
            `loss_fn(model(a, b), y)` that of `(a, b, y)`. Of a batch that is a mapping
            the model gets the items as keyword arguments, and `y` is the batch. A
            function of one argument gets the model's output alone, for example
            `lambda output: output.loss`.
        epochs : int, default 1
            Passes through the dataset.
        validate : Dataset or DataLoader, optional
            Evaluated after each epoch, each rank a share of it. The mean loss over all
            of it is logged as `val_loss`.
        metrics : mapping of str to callable, optional
            `function(output, y)` by name, each a batch's mean; their means over
            `validate` are logged as `val_<name>`.
        patience : int, optional
            Stop after so many epochs in a row without an improvement; by default after
            `epochs`.
        min_delta : float, default 0
            An improvement that is not greater does not count.
        monitor : str, optional
            What has to improve: "val_loss", "val_<name>" of a metric, or "loss", the
            mean over the epoch's samples. By default "val_loss", and "loss" without
            `validate`.
        mode : {"min", "max"}, default "min"
            Whether a lower value is better, or a higher one.
        restore_best : bool, default False
            End with the state of the best epoch, as `stop_early` restores it, also
            where all epochs were run.

        Raises
        ------
        ValueError
            As `prepare`, for `metrics` without `validate`, and for a metric to monitor
            that there is not.

        Examples
        --------
        >>> fit(model, digits(), F.cross_entropy, optimizer=optimizer, batch_size=64)
        """
        check_count("epochs", epochs)
        functions = functions_of_fit(loss_fn, metrics, validates=validate is not None)
        of_data = [] if validate is None else [f"val_{name}" for name in functions]
        monitored, rule = rule_of_fit(
            monitor,
            ["loss", *of_data[1:], *of_data[:1]],
            patience=patience,
            min_delta=min_delta,
            mode=mode,
            restore_best=restore_best,
        )
        if rule is not None:
            self._early_stops.check(rule)
        model, optimizer, loader = self.prepare(
            model,
            optimizer,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            weigh=weigh,
            reduction=reduction,
        )
        size = batch_size or loader.batches.batch_size
        hooked = hooked_parameters(model)
        self._records.note_progress(epochs=epochs)
        score = Scores({"loss": loss_fn})
        watch = None if rule is None else EarlyStop(rule)
        self._records.sum_losses(monitored == "loss")
        for epoch in range(1, epochs + 1):
            self._train_epoch(model, optimizer, loader, score, hooked)
            if self._checkpointer.is_replaying:
                continue
            found: dict[str, float] = {}
            if validate is not None:
                found = self._validate(validate, functions, size)
            if watch is None:
                continue
            if monitored == "loss":
                value, weight = self._records.take_loss()
            else:
                value, weight = found[monitored], 1.0
            at = f"after epoch {epoch} of {epochs}, at step {self._records.num_steps}"
            if self._early_stops.is_to_stop(watch, value, weight, at, monitored):
                self._records.note_progress(epochs=epoch)
                return
        if watch is not None and watch.num_no_better:
            self._early_stops.restore_best(watch)

    def _train_epoch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: RankLoader,
        score: Scores,
        hooked: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        """One pass through the dataset; `hooked` are parameters with the cell's own
        hooks."""
        prepared = self._optimizers[-1].prepared
        model.train()
        for batch in loader:
            loss = prepared.train_batch(score, batch)
            if loss is not None:  # it had a backward pass for each microbatch
                self._loss_hooks.set_loss(loss)
                for name, _ in hooked[:1]:
                    self._checks.note_hook(name, is_of_part=True)
            optimizer.step()
            optimizer.zero_grad()

    def _validate(
        self,
        source: Dataset[Any] | DataLoader[Any],
        functions: Mapping[str, LossFunction],
        batch_size: int,
    ) -> dict[str, float]:
        """Log the means over `source` of the model that was prepared last."""
        prepared = self._optimizers[-1].prepared
        self._unite()
        found = evaluate(
            prepared, source, functions, batch_size=batch_size, peers=self.peers
        )
        self._agree()
        self.log(step=None, **found)
        return found

    def stop_early(
        self,
        metric: Any,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "min",
        restore_best: bool = False,
    ) -> bool:
        """Say whether the loop should end, as a metric no longer improves.

        Collective: all ranks call it, and all get the same answer, by the mean of
        their metrics. Each call in the code has a metric of its own. Counting starts
        again after `prepare`, after it has returned True, and in a run that is resumed.

        Parameters
        ----------
        metric : float
            A number, or a tensor of one element: this rank's. NaN is no improvement.
        patience : int, default 3
            True after so many calls in a row without an improvement.
        min_delta : float, default 0
            An improvement that is not greater does not count.
        mode : {"min", "max"}, default "min"
            Whether a lower value is better, or a higher one.
        restore_best : bool, default False
            When it is True, set what `prepare` made to its state of the best call:
            the models and their optimizers, each rank its own part. It costs no memory
            of the device: at each improvement that state is written to the run's
            folder, as `save_checkpoint` does, and deleted when the run ends.

        Returns
        -------
        bool
            Whether to leave the loop.

        Raises
        ------
        ValueError
            For a metric that is no number, and for `restore_best` where `prepare` has
            made nothing, where the run has no folder, or in a second call in the code.

        Examples
        --------
        >>> for epoch in range(100):
        ...     for x, y in loader:
        ...         train_step(x, y)
        ...     if stop_early(validation_loss(model), patience=3, restore_best=True):
        ...         break
        """
        rule = StopRule(patience, min_delta, mode, restore_best)
        self._early_stops.check(rule)
        if rule.restore_best and not self._optimizers:
            raise ValueError(
                "restore_best restores what prepare made, and this cell has not called "
                "it; save_checkpoint(folder, model=model) where the metric improves, "
                "and load_checkpoint after the loop, do the same"
            )
        value = number_of(metric)
        if self._checkpointer.is_replaying:
            return False  # it was asked when that happened
        at = f"at step {self._records.num_steps}"
        return self._early_stops.asked(rule, value, at)

    def log(self, *, step: int | None = None, **metrics: Any) -> None:
        """Record scalars of this rank: they are plotted live and in `Run.history`.

        Parameters
        ----------
        step : int, optional
            By default the count of optimizer steps in this run; in a run without an
            optimizer, the count of earlier calls with that name.
        **metrics : float
            Numbers, or tensors of one element, by name.

        Raises
        ------
        ValueError
            For a value that is no number, or a name that labkit uses itself.

        Examples
        --------
        >>> log(accuracy=0.9)
        """
        if step is not None:
            step = check_step(step)
        elif self._optimizers and self._loss_hooks.num_backwards:
            step = self._records.num_steps  # 0, within the first step of several passes
        if taken := RESERVED.intersection(metrics):
            raise ValueError(
                f"log({min(taken)}=...): that column of a run's history is labkit's "
                "own; choose another name"
            )
        if self._is_preparing or self._checkpointer.is_replaying:
            return  # nothing has happened, or it was logged when it did
        self._records.log(metrics, step)

    def _mean_of_run(self, value: float, weight: float) -> float:
        """The mean over all ranks of the run. Collective, and no part of what is
        measured of a step."""
        if self.world_size == 1:
            return value
        parts = [weight * value, weight] if weight else [0.0, 0.0]
        with no_dispatch():
            sums = torch.tensor(parts, dtype=torch.float64, device=self.device)
            # Not those alone that share a batch: all leave the loop, or none.
            dist.all_reduce(sums, group=dist.group.WORLD)
            total, whole = sums.tolist()
        return total / whole if whole else math.nan

    def _save_best(self, folder: Path) -> None:
        self._unite(with_optimizer=True)
        self._checkpoints.save_checkpoint(folder)

    # ---- the phases of `prepare` ----

    def _dealer(self, model: nn.Module, *, is_sum: bool) -> Dealer:
        """Deals the samples of a global batch out to ranks and microbatches."""
        is_own = has_own_statistics(model, synchronize=self.options.sync_batchnorm)
        return Dealer(
            self.peers,
            accumulate=self.options.accumulate,
            least=2 if is_own else 1,  # samples, of which BatchNorm has a variance
            is_sum=is_sum,
            own_team=self.team,
        )

    def _parallelized(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Prepared:
        """Both under the strategy of the run. Collective."""
        if is_from_meta(model):
            # Others than those of a model that was prepared before.
            seed_everything(self.seed + len(self._optimizers))
            self.note(FROM_META)
        change_layers(
            model, self.strategy, self.options, note=self.note, undo=self._undo
        )
        if self.options.sync_batchnorm and self.peers.size > 1:
            self._undo.append(watch_plain_batchnorm(self._note_statistics))
        gradients = whole_gradients(model)
        release_former(model.parameters())
        for parameter, gradient in gradients:
            parameter.grad = gradient if gradient is None else gradient.to(parameter)
        if any(gradient is None for _, gradient in gradients):
            self.note(notes.GRADIENTS_OF_SOME)
        self._drop_gradients(model)
        hooked = hooked_parameters(model)  # and not those that a strategy hooks to
        self._is_preparing = True
        try:
            prepared = parallelize(
                self.strategy,
                model,
                optimizer,
                self.mesh,
                self.device,
                self.options,
                note=self.note,
                undo=self._undo,
                roles=self._roles,
            )
        finally:
            self._is_preparing = False
        for name, parameter in hooked:
            is_of_part = prepared.gives_part_of_gradient(parameter)
            self._checks.note_hook(name, is_of_part=is_of_part)
        return prepared

    def _drop_gradients(self, model: nn.Module) -> None:
        """Those from before `prepare`, where a strategy has others in their place."""
        strategy = self.strategy
        if not strategy.is_partitioned or strategy.has_own_gradients:
            return
        if any(parameter.grad is not None for parameter in model.parameters()):
            model.zero_grad()
            self.note(notes.GRADIENTS_BEFORE.format(strategy=strategy.name))

    def _hook(self, prepared: Prepared, step: Forecastable, unset: list[str]) -> None:
        """See the model's forward passes as long as the run lasts."""
        model = prepared.module
        if unset:
            check = model.register_forward_pre_hook(until_set(model, unset))
            self._undo.append(check.remove)
        # Not the method itself, which a copy of the model, or a file, would have, too.
        note = model.register_forward_pre_hook(lambda *call: step.note_input(*call))
        self._undo.append(note.remove)
        self._undo += keep_stand_ins_out(model)
        name, is_in_parts = self.strategy.name, prepared.has_parts
        self._undo += refuse_exports(model, name, is_in_parts=is_in_parts)
        self.forecastable = step

    def _stepping(self, model: nn.Module, prepared: Prepared) -> PreparedOptimizer:
        """The optimizer that the loop sees."""
        kind = PreparedOptimizer.named_as(type(prepared.optimizer))
        stepping = kind(prepared, self._events.take_step)
        stepping.mean_loss = self._mean_over_ranks
        stepping.on_zero_grad = self._events.zero_gradients
        stepping.on_note = self.note
        stepping.num_ranks = self.peers.size
        self._loss_hooks.number_of(stepping)
        self._optimizers.append(stepping)
        speak_as_ddp(model)
        if self.options.accumulate > 1:
            if not prepared.refuses_writes:
                self._undo.append(watch_forward(model, self._note_write))
            # Not the method itself, which a copy of the model would copy, with us.
            vars(model)["zero_grad"] = lambda *a, **kw: stepping.zero_grad(*a, **kw)
            self._undo.append(lambda: vars(model).pop("zero_grad", None))
        return stepping

    def _note_write(self, name: str) -> None:
        self.note(notes.WRITES.format(name=name, count=self.options.accumulate))

    def _rank_loader(
        self,
        loader: DataLoader[Any],
        batches: GlobalBatches | Stream,
        weigh: Weigh | None,
    ) -> RankLoader:
        """This rank's part of the batches; the session sees each."""
        rank_loader = RankLoader(
            loader,
            batches,
            self.device,
            on_epoch=lambda epoch: self._events.begin_epoch(epoch, batches),
            before_batch=self._events.before_batch,
            on_batch=self._events.begin_batch,
            on_end=self._events.end_epoch,
            on_drawn=self._replicas.watch.note_draw,
            weigh=weigh,
        )
        rank_loader.before_evaluation = self._unite
        rank_loader.on_evaluated = self._agree
        if self.peers.size > 1:
            rank_loader.while_shared = self._noting_steps
        rank_loader.refuse = self._refuse
        rank_loader.count_steps = lambda: self.num_steps
        if not batches.is_by_seed:
            rank_loader.on_twice = lambda: self.note(TWICE_AT_ONCE)
        return rank_loader

    # ---- called by the loop ----

    def _refuse(self, refusal: UnsupportedLoopError) -> None:
        """Raise it in the cell, which waits for the thread that calls this."""
        if self._events.has_ended:
            raise refusal
        self.refusal = refusal
        _thread.interrupt_main()

    def _agree(self) -> None:
        """After an evaluation on all ranks. Collective."""
        if (
            self._events.has_ended
            or not self.strategy.is_sharded
            or not is_in_main_thread()
        ):
            return
        for each in self.prepared():
            each.agree()

    def _note_statistics(self) -> None:
        """A BatchNorm that is not of a prepared model has a batch."""
        if self._data.share is not None:
            self.note(notes.OWN_STATISTICS)

    @contextlib.contextmanager
    def _noting_steps(self) -> Iterator[None]:
        """While the loop has a batch of `loader.share`: is it trained on?"""
        is_trained_on, before = torch.is_grad_enabled(), self.num_steps
        yield
        if is_trained_on and self.num_steps > before:
            self.note(notes.TRAINED_ON_SHARE)

    def _mean_over_ranks(self, loss: Any) -> Any:
        """The loss of the whole batch, of this rank's: the weights of all ranks add up
        to their number."""
        num_ranks = self.peers.size
        if num_ranks == 1:
            return loss
        weight = self._loss_hooks.weight / num_ranks
        own = torch.as_tensor(loss)
        mean = self.peers.all_reduce(weight * own.detach())
        # An optimizer may take the gradient itself, which is that of this rank's loss.
        return own + (mean - own.detach()) if own.requires_grad else mean


def whole_gradients(
    model: nn.Module,
) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Those that a former run has left in parts, as a first step would add to them;
    None where they are not of the same step on all ranks. Collective."""
    found: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    are_alike: dict[int, bool] = {}
    for parameter in model.parameters():
        owner = owner_of(parameter)
        if not isinstance(owner, Prepared) or not owner.strategy.has_own_gradients:
            continue
        with contextlib.suppress(UnsupportedLoopError):
            owner.check_ranks()
            if id(owner) not in are_alike:
                are_alike[id(owner)] = owner.has_gradients_alike()
            if not are_alike[id(owner)]:
                found.append((parameter, None))
            elif (gradient := parameter.grad) is not None:
                found.append((parameter, gradient))
    return found


def speak_as_ddp(model: nn.Module) -> None:
    """A loop that was written for DDP says `model.module`, and `model.no_sync()`."""
    for name, value in {"module": model, "no_sync": contextlib.nullcontext}.items():
        if not hasattr(model, name):
            vars(model)[name] = value  # no child: that would make it a part of itself


for _name in TRAINING_NAMES:
    # An error about its arguments names it, and cells have it under this name.
    getattr(Session, _name).__qualname__ = _name
