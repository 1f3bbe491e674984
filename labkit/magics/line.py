"""The line of a magic: its options, its help, and what is wrong with it."""

import argparse
import contextlib
import difflib
import functools
import re
import shlex
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import MISSING
from dataclasses import Field
from dataclasses import fields
from itertools import takewhile
from typing import Any
from typing import get_args

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument

from labkit.checks import UserError
from labkit.checks import is_raised_by_labkit
from labkit.checks import short_repr
from labkit.compat.ipython import options_of
from labkit.magics.current import running_lab
from labkit.notebook.execution.errors import Interrupted
from labkit.options import flag_of
from labkit.options import option_of
from labkit.records import shorten

Args = argparse.Namespace


def options(cls: type[Any], *names: str) -> Callable[[Any], Any]:
    """Arguments of a magic from an options class: those of these names, or all."""

    def add(magic: Any) -> Any:
        # The first decorator that is applied gives the last argument.
        for each in reversed(fields(cls)):
            if not names or each.name in names:
                magic = argument_of(each)(magic)
        return magic

    return add


WRITTEN_OUT = re.compile(r"(?:^|\s)(--config|--space)[\s=]\s*(\{.*?(?:\}|$))")
"""A dict where its name belongs, as messages about a strategy's options show it."""

OF_THE_CELL = {
    ("--epochs", "--batch-size", "--lr", "--learning-rate", "--model", "--optimizer"): (
        ": the code that trains sets epochs, batch size, model and optimizer, for "
        "example fit(model, data, loss_fn, optimizer=sgd, batch_size=64, epochs=3)"
    ),
    ("-n", "--nproc", "--nproc-per-node", "--num-ranks", "--gpus", "--world-size"): (
        ": %dist_start -n N starts the ranks, and a run has all of them"
    ),
    ("--strategy",): ": the strategy is a word of its own, as in %%{magic} ddp",
}
"""What to write where someone looks for these among the options of a training run."""


def argument_of(each: "Field[Any]") -> Any:
    """The argument of a magic for the field of an options class."""
    found = option_of(each)
    help = found.help.replace("%", "%%")
    default = None if each.default is MISSING else each.default
    if default is False:
        return argument(flag_of(each.name), action="store_true", help=help)
    if text := found.default_text or (default is not None and f"{default}"):
        help += f" (default: {text})"
    kinds = {each.type, *get_args(each.type)}
    kind = str if str in kinds else next((e for e in (int, float) if e in kinds), str)
    if found.bare:
        return argument(
            flag_of(each.name),
            nargs="?",
            const=kind(found.bare),
            type=kind,
            default=default,
            metavar=found.metavar,
            help=help,
        )
    names = [found.short] if found.short else []
    return argument(
        *names,
        flag_of(each.name),
        type=kind,
        default=default,
        choices=found.choices,
        metavar=found.metavar,
        help=help,
    )


def given(cls: type[Any], args: Args) -> dict[str, Any]:
    """The values of those options of a class that a magic takes."""
    names = [each.name for each in fields(cls)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What a user can mend is one line, without a traceback through labkit."""
    try:
        yield
    except (ValueError, NameError, UserError) as error:
        if not (isinstance(error, UserError) or is_raised_by_labkit(error)):
            raise
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def interrupts(magic: str) -> Iterator[None]:
    """An interrupt is one line, as that of a cell is; and what there is after it."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted):
            raise
        is_there = running_lab() is not None
        then = "%dist_status shows the ranks" if is_there else "no lab is running"
        raise Interrupted([], f"%{magic} was interrupted; {then}") from None


def parse(magic: Any, line: str) -> argparse.Namespace:
    """The arguments of a magic's line; UsageError, in one line, with what it takes."""
    parser = magic.parser
    parser.allow_abbrev = False  # the next option would give --s another meaning
    if written := WRITTEN_OUT.search(line):
        option, found = written[1], shorten(written[2], 100)
        name = option.lstrip("-")
        raise UsageError(
            f"{option} takes the name of a dict, not the dict: write {name} = {found} "
            f"in a cell of the notebook, then {option} {name}"
        )
    try:
        names = {
            word: action.option_strings[-1]
            for action in options_of(parser)
            for word in action.option_strings
        }
        own, rest = words_of(parser, line)
        read = (
            parser.parse_intermixed_args
        )  # options before a name that may be left out
        if (remainder := rest_of(parser)) is not None:
            remainder.required = False  # it may be empty
            read = parser.parse_args
        typed = [each.split("=")[0] for each in own]
        given = [names[word] for word in typed if word in names]
        if twice := [option for option in given if given.count(option) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        args: argparse.Namespace = read(own)
        if remainder is not None:
            args.arguments = rest
        return args
    except (UsageError, ValueError) as error:
        found = shorten(" ".join(str(error).split()), 300)
        found += what_it_takes(parser, found)
        raise UsageError(f"{found}; %{parser.prog}? shows its help") from None


def what_it_takes(parser: Any, error: str) -> str:
    """What to add to an error of argparse's, which names only what is wrong."""
    actions = options_of(parser)
    if number := re.match(r"argument (\S+): invalid (int|float) value", error):
        flag = number[1].split("/")[-1]
        [action] = [each for each in actions if flag in each.option_strings]
        kind = "whole number" if number[2] == "int" else "number"
        return f"; it takes a {kind}: {flag} {action.metavar or action.dest.upper()}"
    words = {
        (each.option_strings or [each.metavar or each.dest.upper()])[0]: each
        for each in actions
    }
    if missing := re.match("the following arguments are required: (.+)", error):
        needed = {word: words[word] for word in missing[1].split(", ") if word in words}
        return "".join(f"; {word}: {help_of(each)}" for word, each in needed.items())
    if not error.startswith("unrecognized"):
        return ""
    flags = [flag for each in actions for flag in each.option_strings]
    unknown = re.search(r"(?<!\S)--?[a-z][\w-]*", error)
    if unknown and (near := alike(unknown[0], flags)):
        return f" (did you mean {' or '.join(near)}?)"
    number = re.fullmatch(r"unrecognized arguments: (\d+)", error)
    if number and parser.prog in ("dist_start", "dist_check"):
        return f" (did you mean -n {number[1]}?)"
    if unknown and "STRATEGY" in words:
        for flags_of_code, hint in OF_THE_CELL.items():
            if unknown[0] in flags_of_code:
                return hint.format(magic=parser.prog)
    own = [
        word if unknown or each.option_strings else f"{word} ({help_of(each)})"
        for word, each in words.items()
    ]
    return f"; %{parser.prog} takes " + (", ".join(own) or "no arguments")


def help_of(action: argparse.Action) -> str:
    """What the help of a magic says of one argument."""
    return (action.help or "").replace("%%", "%")


def alike(unknown: str, flags: Sequence[str]) -> list[str]:
    """The flags that someone who wrote `unknown` may have meant, three at most: those
    that are written almost so, have one of its words, or begin as one does."""
    found = difflib.get_close_matches(unknown, flags, 1, 0.8)
    words = [word for word in unknown.strip("-").split("-") if word != "num"]
    for flag in flags:
        theirs = flag.strip("-").split("-")
        has_word = any(word in theirs and len(word) > 2 for word in words)
        is_short = len(unknown) > 3 and flag.startswith(unknown)
        if is_short or has_word or any(begins_as(word, theirs[0]) for word in words):
            found.append(flag)
    return [*dict.fromkeys(found)][:3]


def begins_as(word: str, other: str) -> bool:
    """Whether most of `word` is the beginning of `other`."""
    pairs = zip(word, other, strict=False)
    num_alike = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return num_alike >= max(3, 0.75 * len(word))


def rest_of(parser: Any) -> Any:
    """The argument that takes the rest of the line; None where none does."""
    found = [each for each in options_of(parser) if each.nargs == argparse.REMAINDER]
    return found[0] if found else None


def words_of(parser: Any, line: str) -> tuple[list[str], list[str]]:
    """The words of a line, as a shell has them, and those that are not the magic's own:
    where its last argument takes the rest, what follows the first word that is no
    option."""
    if rest_of(parser) is None:
        return in_lists(shlex.split(line)), []
    actions = {
        word: each for each in options_of(parser) for word in each.option_strings
    }
    words = shlex.split(line)
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option = actions.get(words[at])
        at += 1
        if option is None or option.nargs == 0:
            continue
        # A value that may be left out is a number.
        may_lack = option.nargs == "?"
        if not may_lack or (at < len(words) and words[at][0].isdigit()):
            at += 1
    own = [each for each in words[: at + 1] if each != "--"]
    return own, words[at + 1 :]


def without_comment(line: str) -> str:
    """The line up to a word that begins with "#", as a shell has it."""
    for found in re.finditer(r"(^|\s)#", line):
        before = line[: found.start()]
        with contextlib.suppress(ValueError):  # within quotes, which close after it
            shlex.split(before)
            return before
    return line


def names_in(words: Sequence[str]) -> list[str]:
    """The names of a list with spaces, commas or both between them."""
    return [name for word in words for name in word.split(",") if name]


def in_lists(words: list[str]) -> list[str]:
    """The words of a line, where a list may have spaces after its commas: "0, 2"."""
    found: list[str] = []
    for word in words:
        if found and found[-1].endswith(",") and not word.startswith("-"):
            found[-1] += word
        else:
            found.append(word)
    return found


def parsed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A magic that takes its parsed arguments, with the cell below it as `cell`.

    `--help` shows its help; what a user can mend is an error in one line.
    """

    @functools.wraps(method)
    def run(self: Any, line: str, cell: str | None = None) -> Any:
        magic = getattr(self, method.__name__)
        words = without_comment(line)
        if asks_for_help(magic.parser, words):
            print(magic.parser.format_help().removeprefix("::\n\n"))
            return None
        args = parse(magic, words)
        args.cell = None
        if cell is not None:
            args.cell = numbered_like_notebook(method.__name__, line, cell)
        with usage_errors(), interrupts(magic.parser.prog):
            return method(self, args)

    return run


def magic_below(name: str) -> Callable[[str], None]:
    """What a cell magic is where code, or a comment, is above it: an error that says
    so, for which IPython has that there is no such magic."""

    def refuse(line: str) -> None:
        raise UsageError(
            f"%%{name} has to be the first line of its cell; move what is above it, "
            "comments too, below it or into a cell of its own"
        )

    return refuse


def asks_for_help(parser: Any, line: str) -> bool:
    """Whether `--help` is among the magic's own words."""
    if rest_of(parser) is None:
        return "--help" in line.split()
    with contextlib.suppress(ValueError):  # of quotes that do not close, said later
        return "--help" in words_of(parser, line)[0]
    return False


def numbered_like_notebook(magic: str, line: str, cell: str) -> str:
    """The cell with a first line in place of the magic's, so that the line numbers
    of a traceback are the notebook's. A cell magic must stay the first line."""
    if cell.startswith("%%"):
        return cell
    return f"# %%{magic} {line}\n{cell}"


def whole_numbers(text: str) -> list[int]:
    """The numbers of "8,64,512"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--ranks {short_repr(text)}: write world sizes with commas and no spaces, "
            "for example 8,64,512"
        ) from None
