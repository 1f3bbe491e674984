"""What a cell has for checkpoints: `save_checkpoint` and `load_checkpoint`."""

import itertools
import zlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from labkit import checkpoint
from labkit.checkpoint.exchange import all_gather_json
from labkit.checkpoint.exchange import device_of_group
from labkit.checks import UnsupportedLoopError
from labkit.rank.group.recovery import check_groups_of
from labkit.rank.steps.optimizer import PreparedOptimizer
from labkit.rank_spec import format_ranks
from labkit.strategies.mesh.peers import Peers
from labkit.strategies.model import states
from labkit.strategies.model.fingerprints import fingerprints
from labkit.strategies.model.gradients import owner_of
from labkit.strategies.prepared import Prepared
from labkit.strategies.relay.parameters import pipeline_of
from labkit.strategies.zero.engines import is_zero
from labkit.strategies.zero.engines import strategy_of

Named = dict[str, torch.Tensor]


class Checkpoints:
    """Saves and loads what a cell has; `prepared` gives what `prepare` made in it."""

    def __init__(self, prepared: Callable[[], Sequence[Prepared]] = lambda: ()) -> None:
        self._prepared = prepared

    def save_checkpoint(
        self,
        folder: str | PathLike[str],
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        """Save a checkpoint. Collective: all ranks call it, each writes its part.

        Parameters
        ----------
        folder : str or path
            Where it is saved. A checkpoint that is there already is replaced, and only
            once the new one is whole.
        model : nn.Module, optional
            The module to save; by default all that `prepare` made in this cell, with
            its optimizers.
        optimizer : torch.optim.Optimizer, optional
            That of `model`; by default none is saved with a `model` that is given.
        **values : object
            Numbers, strings, tensors, and lists, tuples and dicts of them, for example
            `scheduler=scheduler.state_dict()`. Those of rank 0 are saved.

        Raises
        ------
        ValueError
            If there is nothing to save, if ranks have other values in a `model` that is
            given, or if `folder` has files that are no checkpoint's.
        SaveError
            If a rank could not write its part; what was in `folder` before still is.

        Examples
        --------
        >>> save_checkpoint("checkpoints/first", epoch=epoch)
        >>> epoch = load_checkpoint("checkpoints/first")["epoch"]
        """
        path = path_of(folder)
        tensors, sections = self.collect(model, optimizer)
        if not tensors and not values:
            raise ValueError(
                "there is nothing to save: without model= save_checkpoint saves what "
                "prepare made in this cell, and this cell has not called prepare. Give "
                "model=model, optimizer=optimizer, or values by name; or call "
                "save_checkpoint in the training cell, or give that cell --checkpoint "
                "FOLDER"
            )
        contents = {"sections": sections, "user": values}
        try:
            checkpoint.save(path, tensors, contents)
        except OSError as error:
            raise checkpoint.SaveError(f"{path} was not saved: {error}") from None

    def load_checkpoint(
        self,
        folder: str | PathLike[str],
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any strategy and number of ranks. Collective.

        Parameters
        ----------
        folder : str or path
            What `save_checkpoint` saved.
        model : nn.Module, optional
            The module to load into; by default all that `prepare` made in this cell,
            with its optimizers. With `model` alone only the model's part is read.
        optimizer : torch.optim.Optimizer, optional
            That of `model`, to load its state too.

        Returns
        -------
        dict
            The other values that were saved, by name: the same on every rank.

        Raises
        ------
        ValueError
            If the checkpoint does not fit or is damaged; nothing has changed.
        """
        found = checkpoint.Checkpoint(path_of(folder))
        values = found.values
        user = values.get("user", {})
        if not isinstance(user, dict):
            raise ValueError(
                f"{found.folder} is damaged: its values are not readable; load another "
                "checkpoint"
            )
        self.restore(found, values.get("sections"), model, optimizer)
        return user

    @property
    def names(self) -> dict[str, Callable[..., Any]]:
        """Those that every cell has for checkpoints, with what they call."""
        return {
            "save_checkpoint": self.save_checkpoint,
            "load_checkpoint": self.load_checkpoint,
        }

    def collect(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[Named, list[dict[str, Any]]]:
        """The states of all that `prepare` made, or of what is given, for
        `checkpoint.save`; this rank's part of the tensors, and a section of settings
        for each. Collective."""
        tensors: Named = {}
        sections: list[dict[str, Any]] = []
        with_optimizer = model is None or optimizer is not None
        for number, part in enumerate(self._parts(model, optimizer)):
            if isinstance(part, Prepared) and part.strategy.is_partitioned:
                part.agree()  # or it would be a checkpoint of no one model
            named, settings = part.checkpoint(with_optimizer=with_optimizer)
            tensors |= {prefix(number) + name: tensor for name, tensor in named.items()}
            sections.append(settings)
        return tensors, sections

    def restore(
        self,
        found: checkpoint.Checkpoint,
        sections: Any,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Set what `prepare` made, or what is given, to what `collect` gave."""
        parts = self._parts(model, optimizer)
        if not isinstance(sections, list) or not all(
            isinstance(section, dict) for section in sections
        ):
            raise ValueError(
                f"{found.folder} is damaged: it has no sections; load another "
                "checkpoint"
            )
        if len(parts) > len(sections) or (model is None and len(parts) < len(sections)):
            raise ValueError(
                f"{found.folder} has {len(sections)} models with their optimizers, and "
                f"{len(parts)} were prepared in this cell; prepare as many first, or "
                "give model=model, optimizer=optimizer"
            )
        with_optimizer = model is None or optimizer is not None
        restores = [
            part.restoring(
                checkpoint.Section(found, prefix(number)),
                sections[number],
                with_optimizer=with_optimizer,
            )
            for number, part in enumerate(parts)
        ]
        for restore in restores:
            restore()

    def _parts(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> Sequence["Prepared | UserModel"]:
        if model is None and optimizer is None:
            return self._prepared()
        if model is None:
            raise ValueError(
                "optimizer= alone has no names for its state; give model= as well"
            )
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is {type(model).__name__}; give a torch.nn.Module")
        if isinstance(optimizer, PreparedOptimizer):
            optimizer = optimizer.prepared.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise ValueError(
                f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer"
            )
        for part in self._prepared():
            if model is part.module:
                return [part]
        if (pipeline := pipeline_of(model)) is not None:  # of another cell
            if optimizer not in (None, pipeline.optimizer):
                raise ValueError(
                    "the model is in stages, and this is not the optimizer that it "
                    "was prepared with; give that one, or model=model alone"
                )
            return [pipeline]
        owners = [owner_of(parameter) for parameter in model.parameters()]
        for owner in owners:  # of another cell, which still has its optimizer
            if isinstance(owner, Prepared) and owner.module is model:
                owner.check_ranks()
                if optimizer in (None, owner.optimizer):
                    return [owner]
        if is_zero(model):
            raise ValueError(
                "the model is partitioned by ZeRO, in another cell, and this is not "
                "the optimizer that prepare returned there, or that is gone; save and "
                "load both in the training cell, or give that cell --checkpoint FOLDER"
            )
        if optimizer is not None and (strategy := strategy_of(optimizer)):
            raise ValueError(
                f"the model and its optimizer were prepared under {strategy}, in a "
                "training cell, and the optimizer's state is in parts; save and load "
                "both in that cell, or give it --checkpoint FOLDER. In this cell, give "
                "model=model alone: the model without the optimizer's state"
            )
        return [UserModel(model, optimizer)]


class UserModel:
    """A model, and an optimizer if there is one, that a cell has by itself."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        check_groups_of(model)
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self._model = model
        self._optimizer = optimizer
        self._names = (
            [] if optimizer is None else states.parameter_names(model, optimizer)
        )

    def checkpoint(self, *, with_optimizer: bool) -> tuple[Named, dict[str, Any]]:
        """As `Prepared.checkpoint`."""
        check_alike(self._model)
        tensors = states.model_tensors(self._model)
        if self._optimizer is None:
            return tensors, {}
        check_counts(self._model, self._optimizer)
        settings = states.hyperparameters(self._optimizer, self._names)
        tensors |= states.optimizer_states(self._optimizer, self._names)
        return tensors, settings

    def restoring(
        self, source: states.Source, values: Mapping[str, Any], *, with_optimizer: bool
    ) -> states.Restore:
        """As `Prepared.restoring`."""
        return states.restoring(
            source, values, self._model, self._optimizer, self._names
        )


def check_alike(model: nn.Module) -> None:
    """ValueError where ranks have other values in a parameter that each of them has as
    a whole: each rank writes some of these, and together they would be no one model.
    Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    whole = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and not parameter.is_meta
    }
    # One by one: they may be on several devices.
    own = {name: int(fingerprints([each])) for name, each in whole.items()}
    everyone = all_gather_json(own, "a rank's fingerprints of a model")
    for name in dict.fromkeys(itertools.chain.from_iterable(everyone)):
        by_rank = {rank: by[name] for rank, by in enumerate(everyone) if name in by}
        first = min(by_rank)
        others = [rank for rank in by_rank if by_rank[rank] != by_rank[first]]
        if others:
            raise ValueError(
                f"{name} has one value on rank {first} and another on "
                f"{format_ranks(others)}, and a checkpoint holds one model. Begin with "
                "the same on all ranks, by torch.manual_seed(0) or dist.broadcast, or "
                "save the one of a rank by torch.save in a %%dist 0 cell"
            )


def check_counts(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedLoopError where ranks that have a model in parts have taken different
    numbers of steps with them, as far as the optimizer counts. Collective."""
    counts = {
        float(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and not value.dim()
    }
    number = zlib.crc32(repr(sorted(counts)).encode())
    has_parts = any(isinstance(each, DTensor) for each in model.parameters())
    device = device_of_group()
    everyone = Peers(dist.get_rank(), dist.get_world_size(), device)
    least_of_all = -(2**40)  # of ranks without parts, which are not compared
    sent = [number, -number] if has_parts else [least_of_all] * 2
    most, least = everyone.greatest(sent)
    if most not in (-least, least_of_all):
        raise UnsupportedLoopError(
            "ranks have taken different numbers of steps with this optimizer, for "
            "example because one of them failed in a cell, so their parts no longer "
            "belong to one model. Load a checkpoint, or make model and optimizer again"
        )


def path_of(folder: str | PathLike[str]) -> Path:
    """The path that a user gave; ValueError if it can be none."""
    if not isinstance(folder, str | PathLike) or not Path(folder).name:
        raise ValueError(
            f"folder is {folder!r:.40}; give a path, for example 'checkpoints/first'"
        )
    return Path(folder).expanduser()


def prefix(number: int) -> str:
    """What the names of the tensors of the model of this number begin with."""
    return f"{number}." if number else ""
