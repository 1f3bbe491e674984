"""Checkpoints on disk: of any strategy and world size, for any other; whole or absent.

A checkpoint is a folder: `checkpoint.json` says what there is, and every rank has
written its part of the tensors to a file of its own, in the safetensors format. Nothing
in it is ever unpickled. What to write where, and what to read from where, are the plans
of `torch.distributed.checkpoint`.
"""

from labkit.checkpoint.atomic_folder import prune
from labkit.checkpoint.loading import Checkpoint
from labkit.checkpoint.loading import Section
from labkit.checkpoint.loading import load
from labkit.checkpoint.loading import read
from labkit.checkpoint.saving import Pending
from labkit.checkpoint.saving import SaveError
from labkit.checkpoint.saving import abandon_saves
from labkit.checkpoint.saving import begin_save
from labkit.checkpoint.saving import connect
from labkit.checkpoint.saving import save
from labkit.step_folders import all_in
from labkit.step_folders import last_in
from labkit.step_folders import step_folder

__all__ = [
    "Checkpoint",
    "Pending",
    "SaveError",
    "Section",
    "abandon_saves",
    "all_in",
    "begin_save",
    "connect",
    "last_in",
    "load",
    "prune",
    "read",
    "save",
    "step_folder",
]
