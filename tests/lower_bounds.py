"""Prints the lowest versions that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
BOUND = re.compile(r"([\w-]+)>=([\d.]+)")


def lower_bounds() -> dict[str, str]:
    """Name -> version, of what labkit itself needs; its tests may have newer tools."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["tensorboard"], *extras["widget"]]
    return dict(match.groups() for match in map(BOUND.match, lines) if match)


if __name__ == "__main__":
    for name, version in lower_bounds().items():
        print(f"{name}=={version}")
