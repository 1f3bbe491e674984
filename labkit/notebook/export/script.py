"""A run as a script for torchrun: in plain PyTorch, or with labkit.train."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from pathlib import Path

from labkit.checks import absolute
from labkit.checks import check_choice
from labkit.checks import check_flag
from labkit.notebook.export.cells import indented
from labkit.notebook.export.cells import literal
from labkit.notebook.export.layout import Layout
from labkit.notebook.export.layout import check
from labkit.notebook.export.layout import docstring_of
from labkit.notebook.export.layout import imports_of
from labkit.notebook.export.layout import text_of
from labkit.notebook.export.layout import top_of
from labkit.notebook.export.needed import Parts
from labkit.notebook.export.needed import RunFacts
from labkit.notebook.export.needed import notes_of
from labkit.notebook.export.needed import parts_of
from labkit.notebook.export.plain import NotPlainError
from labkit.notebook.export.plain import plain_text
from labkit.train_options import TrainOptions

STYLES = ("plain", "labkit")


@dataclass(frozen=True)
class Script:
    """A script's text, and what there is to say of it."""

    text: str
    notes: Sequence[str]


def script_of(run: RunFacts, file_name: str, style: str | None = None) -> Script:
    """The script of a run: in plain PyTorch where that has its losses, and otherwise
    with labkit.train, unless `style` says which. ValueError, in words, for one that
    cannot be written."""
    parts = parts_of(run)
    notes = list(notes_of(run, parts.earlier))
    if style != "labkit":
        try:
            text = plain_text(run, parts, file_name, notes)
        except NotPlainError as error:
            if style == "plain":
                raise ValueError(
                    f"{run.name} cannot be written in plain PyTorch: {error}; "
                    "leave out --style plain, and the script imports labkit.train"
                ) from None
            notes.append(
                f"The script imports labkit.train and is not plain PyTorch: {error}"
            )
        else:
            check(text)
            return Script(text, notes)
    text = _text_with_labkit(run, parts, file_name, notes)
    check(text)
    return Script(text, notes)


def check_style(style: str | None) -> None:
    """ValueError for a style that there is not."""
    if style is not None:
        check_choice("style", style, STYLES)


# ---- with labkit.train ----


def _text_with_labkit(
    run: RunFacts, parts: Parts, file_name: str, notes: Sequence[str]
) -> str:
    layout = Layout(parts)
    inside = []
    if layout.globals:
        inside.append("global " + ", ".join(layout.globals))
    inside += [f"{name} = labkit.train.{name}" for name in layout.places]
    inside += [each.source for each in layout.in_main]
    if any(not each.is_constant for each in layout.in_main):
        inside.append("labkit.train.reseed()  # a run begins with its seed")
    if inside and layout.body:
        inside.append("")
    inside.append(layout.body or "pass")
    config = ""
    if run.config:
        text = literal(dict(run.config))
        if text is None:
            raise ValueError(
                f"the config of {run.name} holds more than plain values, which a "
                "script cannot have; train without --config, and change the model or "
                "the strategy's arguments in the cell"
            )
        config = f"CONFIG = {text}"
    own = ["import labkit.train"]
    if layout.calls:
        own.append(f"from labkit.train import {', '.join(layout.calls)}")
    return text_of(
        [
            docstring_of(run, file_name, notes),
            imports_of(layout, own),
            config,
            *top_of(layout),
            f"def {layout.main}():\n" + indented("\n".join(inside)),
            _launch(run, layout.main, has_config=bool(config)),
        ]
    )


def _launch(run: RunFacts, main: str, *, has_config: bool) -> str:
    plain = TrainOptions()
    changed = {
        each.name: getattr(run.options, each.name)
        for each in fields(TrainOptions)
        if each.name not in ("config", "profile")
        and getattr(run.options, each.name) != getattr(plain, each.name)
    }
    if run.seed:
        changed["seed"] = run.seed
    given = [f'"{run.strategy}"', *(f"{name}={v!r}" for name, v in changed.items())]
    if has_config:
        given.append("config=CONFIG")
    return (
        'if __name__ == "__main__":\n'
        f"    options = labkit.train.parser({', '.join(given)})\n"
        f"    labkit.train.run({main}, **vars(options.parse_args()))"
    )


# ---- its file ----


def check_script_file(path: str | os.PathLike[str], *, force: bool) -> Path:
    """The file of a script; ValueError where it cannot be written."""
    check_flag("force", force)
    file = absolute(path)
    if file.is_dir() or not file.parent.is_dir():
        what = "it is a folder" if file.is_dir() else f"there is no {file.parent}"
        raise ValueError(f"{file}: {what}; name a file, such as train.py")
    if file.suffix == ".ipynb":
        raise ValueError(
            f"{file}: a script cannot be a notebook; name a file, such as train.py"
        )
    if file.exists() and not force:
        raise ValueError(
            f"{file} is there already; name another file, or add --force (force=True) "
            "to replace it"
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{file.parent} cannot be written to; name another folder")
    return file


def write_script(file: Path, text: str) -> None:
    """Write it whole, or not at all."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
