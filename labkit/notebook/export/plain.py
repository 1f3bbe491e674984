"""A run as a script in plain PyTorch, where it is certain that it has the losses."""

import ast
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

from labkit.notebook.export import templates
from labkit.notebook.export.cells import begin_of
from labkit.notebook.export.cells import indented
from labkit.notebook.export.cells import left_out
from labkit.notebook.export.cells import statements_of
from labkit.notebook.export.layout import Layout
from labkit.notebook.export.layout import docstring_of
from labkit.notebook.export.layout import imports_of
from labkit.notebook.export.layout import text_of
from labkit.notebook.export.layout import top_of
from labkit.notebook.export.loop import Loop
from labkit.notebook.export.loop import NotPlainError
from labkit.notebook.export.loop import find_loop
from labkit.notebook.export.loop import free
from labkit.notebook.export.loop import without_fit
from labkit.notebook.export.names import ALWAYS_THERE
from labkit.notebook.export.names import names_of
from labkit.notebook.export.needed import CALLS
from labkit.notebook.export.needed import Parts
from labkit.notebook.export.needed import RunFacts
from labkit.options import flag_of
from labkit.train_options import TrainOptions

__all__ = ["NotPlainError", "plain_text"]

_KINDS = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "zero1": "zero",
    "zero2": "zero",
    "zero3": "zero",
}
_WRITTEN_OUT = ("accumulate", "clip", "profile")
"""Options of the step that a script can have, or need not."""
_IMPORTS = """\
import argparse
import csv
import os
import random
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import Sampler"""
_MORE_IMPORTS = {
    "ddp": "from torch.nn.parallel import DistributedDataParallel",
    "fsdp": "from torch import nn\nfrom torch.distributed.fsdp import fully_shard",
    "zero": "import deepspeed",
}
_OWN = {
    *("argparse", "csv", "os", "random", "np", "nn", "DataLoader", "Sampler", "args"),
    *("DistributedDataParallel", "fully_shard", "deepspeed", "RankBatches", "cut"),
    *("seed_everything", "write_losses", "shard", "clip_grad_norm", "sampler"),
    *("step_losses", "is_last", "weight", "config", "bucket", "largest", "tensor"),
    *("num_parameters", "num_samples", "parser"),
    *("torch", "dist", "rank", "world_size", "device"),
    *(name for name in ALWAYS_THERE if not name.startswith("_")),
}
"""Names that such a script has for itself, or reads."""


def plain_text(
    run: RunFacts, parts: Parts, file_name: str, notes: Sequence[str]
) -> str:
    """The script; NotPlainError where it may not have the losses of the run."""
    _check_options(run)
    if parts.call:
        raise NotPlainError("what it ran is a function")
    kind = _KINDS[run.strategy]
    is_even = _is_even(run)
    earlier = "\n".join(each.source for each in parts.earlier)
    _check_names(f"{earlier}\n{parts.body}")
    body = without_fit(parts.body, earlier)
    loop = find_loop(body, earlier)
    for each in parts.earlier:
        if {loop.model, loop.optimizer, loop.loader} & each.names.needs_later:
            raise NotPlainError("a function of an earlier cell uses what prepare takes")
    if kind in ("fsdp", "zero") and loop.making is None:  # it may have states by then
        raise NotPlainError(f"{loop.optimizer} is not made right before prepare")
    if kind == "zero" and "Adagrad" in f"{earlier}\n{body}":
        raise NotPlainError("DeepSpeed replaces Adagrad by one of its own")
    written = _written_out(body, loop, kind, run.strategy, is_even=is_even)
    layout = Layout(Parts(parts.earlier, written))
    inside = ["global " + ", ".join(layout.globals)] if layout.globals else []
    inside.append(templates.MAIN)
    if "local_rank" in layout.places:
        inside.append('local_rank = int(os.environ["LOCAL_RANK"])')
    inside += [each.source for each in layout.in_main]
    if any(not each.is_constant for each in layout.in_main):
        inside.append("seed_everything(args.seed)  # a run begins with its seed")
    inside += ["", layout.body, "", templates.END]
    needs_clip = kind == "fsdp"
    launch = templates.LAUNCH.format(
        seed=run.seed,
        accumulate=run.options.accumulate,
        clip=run.options.clip,
        main=layout.main,
        more=templates.LOCAL_RANK if kind == "zero" else "",
    )
    return text_of(
        [
            docstring_of(run, file_name, notes),
            imports_of(layout, [_IMPORTS, _MORE_IMPORTS[kind]]),
            *top_of(layout),
            templates.EVEN_BATCHES if is_even else templates.UNEVEN_BATCHES,
            templates.SEED,
            *([templates.SHARD, templates.CLIP] if needs_clip else []),
            templates.WRITE_LOSSES,
            f"def {layout.main}(args):\n" + indented("\n".join(inside)),
            launch,
        ]
    )


def _check_options(run: RunFacts) -> None:
    if run.strategy not in _KINDS:
        raise NotPlainError(f"strategy {run.strategy} needs labkit.train")
    if run.checkpoints is not None:
        raise NotPlainError("a run with checkpoints needs labkit.train")
    plain = TrainOptions()
    for each in fields(TrainOptions):
        name = each.name
        given = run.config if name == "config" else getattr(run.options, name)
        if name not in _WRITTEN_OUT and given != getattr(plain, name):
            raise NotPlainError(f"{flag_of(name)} needs labkit.train")


def _is_even(run: RunFacts) -> bool:
    """Whether all parts of all batches were equal; NotPlainError where some rank had
    none, or where that is not known."""
    if not run.samples:
        raise NotPlainError("it is not known how many samples its ranks had")
    num_parts = run.world_size * run.options.accumulate
    for counts in run.samples:
        size = sum(counts)
        microbatches = _sizes(size, run.options.accumulate)
        by_rank = zip(*(_sizes(m, run.world_size) for m in microbatches), strict=True)
        if size < num_parts or counts != tuple(map(sum, by_rank)):
            raise NotPlainError(f"a batch has {size} samples for {num_parts} parts")
    return all(sum(counts) % num_parts == 0 for counts in run.samples)


def _sizes(size: int, num_parts: int) -> list[int]:
    """Of the parts that so many samples are cut into, as `templates` cuts them."""
    ends = [-(-number * size // num_parts) for number in range(num_parts + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _check_names(code: str) -> None:
    """NotPlainError where cells use names that the script has for itself, unless they
    import the same."""
    own = statements_of("\n".join([_IMPORTS, *_MORE_IMPORTS.values()]), "")
    known = {line for each in own for line in _import_lines(each.node)}
    tree = ast.parse(code)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            by_line = zip(_import_lines(node), node.names, strict=True)
            node.names = [alias for line, alias in by_line if line not in known]
    tree.body = [node for node in tree.body if getattr(node, "names", None) != []]
    found = names_of(ast.unparse(tree))
    if taken := (found.binds | found.sets) & {*_OWN, *CALLS}:
        raise NotPlainError(f"a cell has its own {min(taken)}")
    if "import *" in ast.unparse(tree):
        raise NotPlainError("a cell imports *, which may be any names")


def _import_lines(node: ast.stmt) -> list[str]:
    """Each name that a statement imports, in a line of its own: a module of a package
    as one that comes from it, in whichever way that is written."""
    match node:
        case ast.Import(names=names):
            return [_import_line(each) for each in names]
        case ast.ImportFrom(module=module, names=names):
            return [
                f"from {module} import {each.name} as {each.asname or each.name}"
                for each in names
            ]
    return []


def _import_line(alias: ast.alias) -> str:
    package, dot, name = alias.name.rpartition(".")
    if alias.asname is None:  # what it binds is the package
        return f"import {alias.name.split('.')[0]}"
    if dot:
        return f"from {package} import {name} as {alias.asname}"
    return f"import {ast.unparse(alias)}"


def _written_out(
    body: str, loop: Loop, kind: str, strategy: str, *, is_even: bool
) -> str:
    """The cell with `prepare` and the loop as plain PyTorch has them."""
    found = names_of(body)
    used = found.binds | found.all_needs
    loss, dataset = ast.unparse(loop.loss), loop.dataset
    bind = record = ""
    if not dataset.isidentifier():
        dataset = free("dataset", used)
        bind = f"{dataset} = {loop.dataset}\n"
    if not loss.isidentifier():
        loss = free("loss", used)
        record = f"{loss} = {ast.unparse(loop.loss)}\n"
    # `x, y = f(x, y)` in the loop may change how many there seem to be.
    remade = (
        loop.batch[0] in names_of("\n".join(map(ast.unparse, loop.loop.body))).binds
    )
    names = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "loader": loop.loader,
        "dataset": dataset,
        "bind": bind,
        "batch_size": loop.batch_size,
        "shuffle": loop.shuffle,
        "stage": strategy[-1],
        "num_samples": "num_samples" if remade else f"len({loop.batch[0]})",
        "loss": loss if is_even else f"{loss} * weight",
    }
    wrap = templates.WRAP[kind].format(**names)
    load = templates.LOADER.format(**names)
    record += templates.BACKWARD[kind].format(**names) + "\n"
    record += templates.RECORD.format(**{**names, "loss": loss})
    moved = [f"{name}.to(device)" for name in loop.batch]
    begin = [f"{', '.join(loop.batch)} = {', '.join(moved)}"]
    begin += [f"num_samples = len({loop.batch[0]})"] if remade else []
    begin += templates.BEGIN[kind].format(**names).splitlines()
    if not is_even:
        begin.append(templates.WEIGHT)
    replaced = [
        (loop.zero_grad, ""),
        (loop.step, templates.STEP[kind].format(**names)),
        (loop.backward, record),
        (loop.prepare, load if kind == "fsdp" else f"{wrap}\n{load}"),
    ]
    edits = [
        (begin_of(node) - 1, node.end_lineno, node.col_offset, text.splitlines())
        for node, text in replaced
    ]
    first = loop.loop.iter.end_lineno or 0
    edits.append((first, first, loop.loop.body[0].col_offset, begin))
    if kind == "fsdp":
        assert loop.making is not None
        at = begin_of(loop.making) - 1
        edits.append((at, at, 0, wrap.splitlines()))
    lines = body.splitlines()
    # From the end, so that the lines before stay where they are.
    for start, end, indent, block in sorted(edits, key=lambda each: -each[0]):
        lines[start:end] = [" " * indent + line if line else line for line in block]
    return _without_log("\n".join(lines))


def _without_log(code: str) -> str:
    """Without calls of `log`, which plots what it is given."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="log"))):
                before = lines[node.lineno - 1].encode()[: node.col_offset]
                after = lines[(node.end_lineno or 0) - 1].encode()[
                    node.end_col_offset :
                ]
                if before.strip() or (after.strip() and after.strip()[:1] != b"#"):
                    raise NotPlainError("a call of log shares its line")
                for number in range(node.lineno - 1, node.end_lineno or 0):
                    lines[number] = left_out(lines[number])
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    if "log" in names_of(text).all_needs:
        raise NotPlainError("a call of log is a part of an expression")
    return text
