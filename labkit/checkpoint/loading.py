"""Reads checkpoints: into the tensors of any strategy, on any number of ranks."""

import functools
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import safe_open

from labkit.checkpoint.json_values import decode
from labkit.checkpoint.manifest import DTYPES
from labkit.checkpoint.manifest import Entry
from labkit.checkpoint.manifest import read_manifest

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

_NAMES_SHOWN = 3


class Checkpoint:
    """A checkpoint on disk, opened and found whole.

    Parameters
    ----------
    folder : Path
        Where it is.

    Attributes
    ----------
    tensors : dict
        Shape and dtype of every tensor, by name.

    Raises
    ------
    ValueError
        If it is damaged, or none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._entries, self._values = read_manifest(self.folder)
        self.tensors = {
            name: (entry.shape, entry.dtype) for name, entry in self._entries.items()
        }
        """Shape and dtype of every tensor, by name."""
        self._check_files()

    @property
    def values(self) -> dict[str, Any]:
        """What was saved besides `tensors`; ValueError if it is damaged."""
        try:
            # Each tensor once, however often it is named.
            found = decode(self._values, functools.cache(self.tensor))
        except (KeyError, TypeError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(
                f"{self.folder} is damaged: its values are not readable; load another "
                "checkpoint"
            )
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """Read the whole of one tensor.

        Parameters
        ----------
        name : str
            One of `tensors`.

        Returns
        -------
        Tensor
            On the CPU.
        """
        shape, dtype = self.tensors[name]
        whole = torch.empty(shape, dtype=dtype)
        self.fill({name: whole})
        return whole

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read into tensors; each rank reads what it has a part of.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            By name; plain ones, or DTensors of any sharding.

        Raises
        ------
        ValueError
            Unless all are there in these shapes; nothing has been read.
        """
        from torch.distributed.checkpoint import DefaultLoadPlanner

        self.check(tensors)
        planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planner.set_up_planner(dict(tensors), self._metadata(tensors))
        by_file: dict[str, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            index = item.storage_index
            file = next(
                part.file
                for part in self._entries[index.fqn].parts
                if part.offset == tuple(index.offset or ())
            )
            by_file.setdefault(file, []).append(item)
        for file, items in by_file.items():
            with safe_open(self.folder / file, framework="pt") as opened:
                for item in items:
                    block = tuple(
                        slice(begin, begin + length)
                        for begin, length in zip(
                            item.storage_offsets, item.lengths, strict=True
                        )
                    )
                    found = opened.get_slice(item.storage_index.fqn)[block]
                    planner.resolve_tensor(item).detach().copy_(found)

    def check_all_asked(self, names: Iterable[str]) -> None:
        """Check that no tensor would be left out.

        Parameters
        ----------
        names : iterable of str
            Of the tensors that are read.

        Raises
        ------
        ValueError
            If there are others besides.
        """
        if more := sorted(self._own() - set(names)):
            raise ValueError(
                f"{self.folder} has tensors that were not asked for: {some(more)}; ask "
                "for all of them, or pass strict=False"
            )

    def _own(self) -> set[str]:
        """Names of the tensors that are not among the values."""
        return {name for name in self.tensors if not name.startswith("values.")}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that `fill` can read into tensors.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            As for `fill`.

        Raises
        ------
        ValueError
            Unless all are there, in these shapes and in dtypes like these.
        """
        if missing := [name for name in tensors if name not in self.tensors]:
            raise ValueError(
                f"{self.folder} has no {some(missing)}; use the model and optimizer "
                "that were saved, or load another checkpoint"
            )
        wrong = [
            f"{name} is {shape} there and {tuple(tensor.shape)} here"
            for name, tensor in tensors.items()
            if (shape := self.tensors[name][0]) != tuple(tensor.shape)
        ]
        if wrong:
            raise ValueError(
                f"{self.folder} has other shapes: {some(wrong)}; build the model as it "
                "was when the checkpoint was saved"
            )
        unlike = [
            f"{name} is {dtype} there and {tensor.dtype} here"
            for name, tensor in tensors.items()
            if (dtype := self.tensors[name][1]) != tensor.dtype
            and not (dtype.is_floating_point and tensor.is_floating_point())
        ]
        if unlike:
            raise ValueError(
                f"{self.folder} has other dtypes: {some(unlike)}; build the model as "
                "it was when the checkpoint was saved"
            )

    def _metadata(self, names: Iterable[str]) -> "Metadata":
        from torch.distributed.checkpoint import metadata

        return metadata.Metadata(
            {
                name: metadata.TensorStorageMetadata(
                    metadata.TensorProperties(self._entries[name].dtype),
                    torch.Size(self._entries[name].shape),
                    [
                        metadata.ChunkStorageMetadata(
                            torch.Size(part.offset), torch.Size(part.shape)
                        )
                        for part in self._entries[name].parts
                    ],
                )
                for name in names
            }
        )

    def _check_files(self) -> None:
        """ValueError unless every file is there and has what `checkpoint.json` says."""
        by_file: dict[str, dict[str, tuple[Entry, tuple[int, ...]]]] = {}
        for name, entry in self._entries.items():
            for part in entry.parts:
                by_file.setdefault(part.file, {})[name] = (entry, part.shape)
        for file, parts in by_file.items():
            path = self.folder / file
            if not path.is_file():
                raise ValueError(
                    f"{self.folder} is damaged: {file} is missing; load another "
                    "checkpoint"
                )
            try:
                with safe_open(path, framework="pt") as opened:
                    for name, (entry, shape) in parts.items():
                        found = opened.get_slice(name)
                        if tuple(found.get_shape()) != shape or (
                            DTYPES.get(found.get_dtype()) != entry.dtype
                        ):
                            raise ValueError(
                                f"{path} is damaged: {name} has another shape or "
                                "dtype than checkpoint.json says; load another "
                                "checkpoint"
                            )
            except (SafetensorError, OSError, KeyError) as error:
                raise ValueError(
                    f"{path} is damaged: {error}; load another checkpoint"
                ) from None


class Section:
    """The tensors of a checkpoint whose names begin with a prefix, by the rest.

    Parameters
    ----------
    checkpoint : Checkpoint
        What it is a section of.
    prefix : str
        As "0.", for the first model of a run.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.tensors = {
            name.removeprefix(prefix): described
            for name, described in checkpoint.tensors.items()
            if name.startswith(prefix)
        }
        self._checkpoint = checkpoint
        self._prefix = prefix

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `Checkpoint.check`."""
        self._checkpoint.check(self._named(tensors))

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `Checkpoint.fill`."""
        self._checkpoint.fill(self._named(tensors))

    def _named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self._prefix + name: tensor for name, tensor in tensors.items()}


def load(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, strict: bool = True
) -> dict[str, Any]:
    """Read a checkpoint into tensors. Not collective.

    Parameters
    ----------
    folder : Path
        Where it is.
    tensors : mapping of str to Tensor
        By name; plain ones, or DTensors of any sharding, of which each rank reads what
        it has a part of.
    strict : bool, default True
        Refuse a checkpoint that has other tensors besides.

    Returns
    -------
    dict
        The values that were saved, by name.

    Raises
    ------
    ValueError
        If the checkpoint is damaged, or lacks one of the tensors or has it in another
        shape; nothing has changed.
    """
    checkpoint = Checkpoint(folder)
    if strict:
        checkpoint.check_all_asked(tensors)
    values = checkpoint.values
    checkpoint.fill(tensors)
    return values


def read(
    folder: Path,
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]:
    """Read what a checkpoint has, without its tensors.

    Parameters
    ----------
    folder : Path
        Where it is.

    Returns
    -------
    tensors : dict
        Shape and dtype of every tensor, by name.
    values : dict
        The values that were saved, by name.

    Raises
    ------
    ValueError
        If the checkpoint is damaged.
    """
    checkpoint = Checkpoint(folder)
    return checkpoint.tensors, checkpoint.values


def some(found: list[str]) -> str:
    """The first few of them, and how many there are."""
    shown = ", ".join(found[:_NAMES_SHOWN])
    more = len(found) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
