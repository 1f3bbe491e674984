"""Checks what a user gave: what is wrong is an error in one line."""

import difflib
import keyword
import operator
import os
import re
import reprlib
import sys
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.records import RANK_NAMES

MAX_METRIC_BYTES = 200
"""Of a metric's name."""


class UserError(RuntimeError):
    """A state that the user can change, or what happened to ranks.

    Its message says all that there is to know: magics show it in one line. Any other
    RuntimeError is a fault of labkit's or of a library, and keeps its traceback.
    """


class UnsupportedLoopError(ValueError):
    """A loop whose result would not be that of one process on the same batches.

    Its message says what was found, and what to write instead.
    """


def is_raised_by_labkit(error: BaseException) -> bool:
    """Whether labkit itself raised it, and no library that labkit called."""
    frames = error.__traceback__
    assert frames is not None
    while frames.tb_next is not None:
        frames = frames.tb_next
    package = str(frames.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    return package == "labkit"


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxlong = 40


def short_repr(value: Any) -> str:
    """`value` for an error message: one line, and not a long one."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python refuses to write out a number of very many digits
        text = f"a huge {type(value).__name__}"
    return " ".join(text.split())


def several(names: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return names[0] + others


def is_int(value: Any) -> bool:
    """Whether `value` is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float that is finite, and no bool."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_run_name(value: Any) -> bool:
    """Whether a run can be called so: its name is part of that of a folder, and is
    written on a magic line."""
    return (
        isinstance(value, str)
        and re.fullmatch(r"\w[\w.-]*", value) is not None
        and len(value.encode()) <= 200
    )


def check_count(what: str, value: Any, meaning: str = "", *, most: int = 2**31) -> None:
    """ValueError unless `value` is a whole number from 1 to `most`."""
    if not (is_int(value) and 1 <= value <= most):
        is_small = not is_int(value) or value < 1
        limit = ", 1 or more" if is_small else f" from 1 to {most:,}"
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a whole number{limit}"
            + (f": {meaning}" if meaning else "")
        )


def check_flag(what: str, value: Any) -> None:
    """ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {short_repr(value)}; it must be True or False")


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """ValueError unless `value` is one of the words in `choices`."""
    known = list(choices)
    word = value if isinstance(value, str) else ""
    if word not in known:
        near = difflib.get_close_matches(word.lower(), known, 1)
        raise ValueError(
            f"unknown {what} {short_repr(value)}; choose one of: {', '.join(known)}"
            + (f" (did you mean {near[0]}?)" if near else "")
        )


def check_mesh(what: str, value: Any) -> None:
    """ValueError unless `value` is text; its sizes are checked with the ranks."""
    if not isinstance(value, str):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be text with the sizes of axes, "
            'for example "dp=2,tp=2"'
        )


def check_staleness(what: str, value: Any) -> None:
    """ValueError unless `value` can be a number of steps, 0 or more."""
    if not is_int(value) or not 0 <= value < 2**31:
        raise ValueError(
            f"{what} is {short_repr(value)}: the steps that a worker may be ahead of "
            "the slowest one, a whole number, 0 or more"
        )


def slow_rank(value: str) -> tuple[int, float]:
    """The rank and the factor of "RANK=FACTOR"; ValueError for another text."""
    found = re.fullmatch(r"(\d{1,4})=(\d{1,3}(?:\.\d*)?)", str(value))
    if found is None or float(found[2]) < 1:
        raise ValueError(
            f"slow is {short_repr(value)}: write the rank and by what factor its step "
            "is to take longer, 1 or more, for example 1=3"
        )
    return int(found[1]), float(found[2])


def check_slow(what: str, value: Any) -> None:
    """ValueError unless `value` says which rank is slow, and how slow."""
    slow_rank(value)


def check_code(code: Any) -> None:
    """ValueError unless `code` is text that can be sent."""
    if not isinstance(code, str):
        raise ValueError(
            f"{short_repr(code)} is neither code nor a function; give code as a string"
        )
    try:
        code.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the code cannot be sent as UTF-8: {error}") from None


def check_step(step: Any) -> int:
    """A step as an int, also one of NumPy's; ValueError unless it is a whole number."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool) or abs(number) >= 2**62:
        raise ValueError(
            f"log(step={short_repr(step)}): the step must be a whole number"
        )
    return number


def is_metric(name: Any) -> bool:
    """Whether a metric can be called so, in a file as in a picture."""
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= MAX_METRIC_BYTES
    except UnicodeEncodeError:
        return False


def check_metric(name: Any) -> None:
    """ValueError unless a rank can log a metric of this name."""
    if not is_metric(name):
        raise ValueError(
            f"log({short_repr(name)}=...): a metric's name is a string of 1 to "
            f"{MAX_METRIC_BYTES} bytes in UTF-8"
        )


def check_seed(what: str, value: Any) -> None:
    """ValueError unless `value` can seed torch's generators."""
    if not (is_int(value) and 0 <= value < 2**63):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a whole number from 0 to "
            "2**63 - 1"
        )


def check_positive(what: str, value: Any, meaning: str) -> None:
    """ValueError unless `value` is a finite number above 0."""
    if not (is_number(value) and value > 0):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a positive number: {meaning}"
        )


MAX_PROFILED = 100
"""Steps of a run: each has thousands of events on every rank."""
PROFILED = 3
"""Steps, where nothing else is asked for."""
UNPROFILED = 10
"""Steps before them, in which all is made and warmed up."""


def steps_to_profile(value: Any, taken: int = 0) -> range:
    """The steps that "5" (so many, after the first ten that a run takes) or "20-24"
    asks for, and True; ValueError for anything else. `taken` were before the run."""
    found = None
    if isinstance(value, str | int) and not isinstance(value, bool):
        found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})", str(value))
    if found is not None and found[1]:
        steps = range(int(found[1]), int(found[2]) + 1)
    else:
        number = PROFILED if value is True else int(found[2]) if found else 0
        steps = range(taken + UNPROFILED + 1, taken + UNPROFILED + 1 + number)
    if not 1 <= len(steps) <= MAX_PROFILED or steps[0] < 2:
        raise ValueError(
            f"profile is {short_repr(value)}: write how many steps, after the first "
            f"{UNPROFILED}, or which ones, for example 5 or 20-24; {MAX_PROFILED} at "
            "most, and from the second on"
        )
    return steps


def check_profile(what: str, value: Any) -> None:
    """ValueError unless `value` says which steps are to be profiled, or none."""
    if value is not False:
        steps_to_profile(value)


def check_config(what: str, value: Any) -> None:
    """ValueError unless `value` is a dict that a strategy can read."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise ValueError(
            f"{what} is {short_repr(value)}; give a dict whose keys are names of the "
            'strategy\'s own library, such as {"bucket_cap_mb": 5} for ddp'
        )


def check_folder(what: str, value: Any) -> None:
    """ValueError unless `value` can name a folder."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{what} is {short_repr(value)}; it must name a folder")


def absolute(path: str | os.PathLike[str]) -> Path:
    """`path` from the working directory on; UserError where that is gone."""
    try:
        return Path(path).expanduser().absolute()
    except FileNotFoundError:
        raise UserError(
            "the working directory has been deleted; change to another with %cd "
            "(os.chdir)"
        ) from None


def check_run_name(what: str, value: Any) -> None:
    """ValueError unless a run can be called `value`."""
    if not is_run_name(value):
        raise ValueError(
            f"run {what} {short_repr(value)}; use letters, digits, '.', '-' and '_' "
            "only, the first a letter, a digit or '_', and at most 200 bytes"
        )


def check_pushed_name(name: str) -> None:
    """ValueError unless a variable that is pushed can be called so on the ranks."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"{short_repr(name)} is not a valid variable name; use letters, digits and "
            "_, no digit first and no keyword"
        )
    if name in RANK_NAMES or (name.startswith("__") and name.endswith("__")):
        raise ValueError(
            f"every rank has a {name} of its own; push yours under another name, for "
            f"example my_{name}"
        )


def check_timeout(what: str, value: Any) -> None:
    """ValueError unless `value` is None or a number of seconds."""
    if value is not None and not (is_number(value) and value > 0):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a number of seconds greater "
            "than 0; leave it out for no limit"
        )


def check_hang_after(what: str, value: Any) -> None:
    """ValueError unless `value` is a number of seconds, or 0."""
    if not (is_number(value) and value >= 0):
        raise ValueError(
            f"{what} is {short_repr(value)}; it must be a number of seconds, or 0 for "
            "no note about ranks that hang"
        )
