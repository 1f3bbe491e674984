"""The command line: `python -m labkit check`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from labkit.checks import UserError
from labkit.notebook.cluster.placement import StartOptions
from labkit.options import flag_of
from labkit.options import option_of
from labkit.selftest import ONLY_HELP
from labkit.selftest import OUTPUT
from labkit.selftest import OUTPUT_HELP
from labkit.selftest import check

INTERRUPTED = 130
"""The exit status of a program that SIGINT has ended, as shells have it."""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser("python -m labkit", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="check that labkit works on this machine",
        description="Check that labkit works on this machine; some 20 s on two CPU "
        "ranks. The exit status is 0 where all is right, 1 where something failed, 2 "
        "for a wrong command line, 130 after an interrupt.",
    )
    for each in fields(StartOptions):
        if each.name in ("num_ranks", "backend", "device"):
            found = option_of(each)
            command.add_argument(
                *([found.short] if found.short else []),
                flag_of(each.name),
                type=int if each.name == "num_ranks" else str,
                default=each.default,
                choices=found.choices,
                metavar=found.metavar,
                help=found.help,
            )
    command.add_argument("--only", metavar="NAME,NAME", help=ONLY_HELP)
    command.add_argument(
        "--output",
        metavar="FILE",
        default=OUTPUT,
        help=f"{OUTPUT_HELP} (default: {OUTPUT})",
    )
    command.set_defaults(parser=command)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    given = vars(parse(words))
    parser = given.pop("parser")
    try:
        report = check(**given)
    except (ValueError, UserError) as error:
        parser.error(str(error))
    except KeyboardInterrupt as error:
        print(error, file=sys.stderr)
        return INTERRUPTED
    print(report)
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
