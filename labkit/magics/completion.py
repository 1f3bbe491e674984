"""What Tab offers in the line of a magic, and in a cell for ranks."""

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from IPython import get_ipython
from IPython.core.completer import CompletionContext
from IPython.core.completer import SimpleCompletion
from IPython.core.completer import SimpleMatcherResult
from IPython.core.completer import context_matcher

from labkit.compat.ipython import options_of
from labkit.magics.current import own_runs
from labkit.magics.current import running_lab
from labkit.magics.lab_magics import LabMagics
from labkit.notebook.runs.record import RUN_STATES
from labkit.strategies import STRATEGIES

LINE = re.compile(r"\s*(?:\w+\s*=\s*)?%%?(dist\w*)\s+(.*)", re.DOTALL)
"""A magic and what follows it, up to the cursor."""

OF_RUNS = {
    *(("dist_runs", "names"), ("dist_runs", "delete")),
    *(("dist_show", "name"), ("dist_export", "run")),
}
OF_NOTEBOOK = {
    *(("dist_push", "names"), ("dist_train", "function"), ("dist_train", "config")),
    *(("dist_tune", "function"), ("dist_tune", "config"), ("dist_tune", "space")),
}
OF_RANKS = {
    *(("dist_pull", "names"), ("dist_estimate", "model")),
    *(("dist_estimate", "input"), ("dist_estimate", "optimizer")),
}
"""The arguments that name a run, a variable of the notebook, or one of rank 0: by magic
and argument."""


# Before IPython's own, which know the notebook's variables and files alone.
@context_matcher(identifier="labkit", priority=200)
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """What labkit knows of the text before the cursor; nothing where that is no magic
    of its own, nor a cell for ranks."""
    lines = context.full_text.split("\n")
    magics = [*takewhile(lambda line: line.startswith("%%"), lines)]
    start = len(context.text_until_cursor)
    words: list[tuple[str, str]] = []
    if context.cursor_line < len(magics) or not _is_for_ranks(magics):
        if found := LINE.fullmatch(context.text_until_cursor):
            *before, typed = re.split(r"\s+", found[2])
            start -= len(typed)
            words = [(word, "magic") for word in _in_line(found[1], before, typed)]
    else:
        # IPython completes nothing below lines that are all empty.
        above = "\n".join(lines[len(magics) : context.cursor_line]).lstrip()
        above += "\n" if above else ""
        code = above + context.text_until_cursor
        start, words = _on_rank(_rank_of(magics[-1]), code)
        start -= len(above)
    return SimpleMatcherResult(
        completions=[SimpleCompletion(text, type=kind) for text, kind in words],
        matched_fragment=context.text_until_cursor[start:],
        suppress=True,
    )


def _is_for_ranks(magics: list[str]) -> bool:
    names = LabMagics.magics["cell"]
    return bool(magics) and magics[-1][2:].split(" ")[0] in names


def _rank_of(magic: str) -> int:
    """The rank to ask: the first of those that the cell is for."""
    found = re.match(r"%%dist\s+(\d+)", magic)
    return int(found[1]) if found else 0


def _on_rank(rank: int, code: str) -> tuple[int, list[tuple[str, str]]]:
    lab = running_lab()
    if lab is None or rank >= lab.world_size:
        return len(code), []
    return lab.complete(code, rank)


def _in_line(magic: str, before: list[str], typed: str) -> list[str]:
    """What may stand in a magic's line after these words; what is typed of it."""
    if magic not in {*LabMagics.magics["line"], *LabMagics.magics["cell"]}:
        return []
    actions = options_of(getattr(LabMagics, magic).parser)
    flags = {flag: each for each in actions for flag in each.option_strings}
    places = [each for each in actions if not each.option_strings]
    awaited: Any = None  # the option whose value comes next
    for word in before:
        if word in flags:
            awaited = flags[word] if flags[word].nargs != 0 else None
        elif awaited is None:
            # The last of them may be a list.
            places = places if places and places[0].nargs in ("*", "+") else places[1:]
        elif awaited.nargs != "+":
            awaited = None
    takes = awaited or next(iter(places), None)
    found = [] if takes is None else [*_values(magic, takes, typed)]
    if awaited is None and (typed.startswith("-") or not (found or typed or takes)):
        found = [flag for flag in flags if flag not in before and flag[:2] == "--"]
    return [word for word in found if word.startswith(typed)]


def _values(magic: str, action: Any, typed: str) -> Iterable[str]:
    """The values that an argument of a magic can have, as far as labkit knows them."""
    of = magic, action.dest
    if action.choices:
        return list(action.choices)
    if action.dest == "strategy":
        return list(STRATEGIES)
    if of == ("dist_runs", "state"):
        return RUN_STATES
    if of in OF_RUNS:
        return [run.name for run in own_runs()]
    if of in OF_RANKS:
        return [text for text, _ in _on_rank(0, typed)[1]]
    if of in OF_NOTEBOOK:
        shell = get_ipython()
        return [name for name in shell.user_ns if name not in shell.user_ns_hidden]
    return []
