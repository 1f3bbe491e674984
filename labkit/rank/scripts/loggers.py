"""A script's loggers: new for it, and put back after it."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from labkit.rank.scripts.modules import OwnModules

_OF_LOGGING = ("lastResort", "raiseExceptions")


def fresh_loggers(modules: OwnModules) -> Callable[[], None]:
    """Make the root logger, and those that are no library's, as in a new process;
    what puts them back. Of a library's only whether it is disabled, which
    `logging.config` does to all that there are.

    `logging.basicConfig` does nothing where the root logger has a handler, and what a
    script has added would say everything twice in its second run.
    """
    root = logging.getLogger()
    own = {k: each for k, each in _all_loggers() if not _is_of_library(k, modules)}
    before = {name: _state(each) for name, each in own.items()}
    is_disabled = {name: each.disabled for name, each in _all_loggers()}
    disabled = root.manager.disable
    settings = {name: getattr(logging, name) for name in _OF_LOGGING}
    kind, factory = logging.getLoggerClass(), logging.getLogRecordFactory()
    for name, each in own.items():
        _set_state(each, _new(name))

    def restore() -> None:
        root.manager.disable = disabled
        for name, value in settings.items():
            setattr(logging, name, value)
        logging.setLoggerClass(kind)
        logging.setLogRecordFactory(factory)
        for name, each in _all_loggers():
            each.disabled = is_disabled.get(name, False)
            if name not in before and _is_of_library(name, modules):
                continue
            state = before.get(name, _new(name))
            for handler in [h for h in each.handlers if h not in state["handlers"]]:
                each.removeHandler(handler)
                handler.close()
            _set_state(each, state)

    return restore


def _new(name: str) -> dict[str, Any]:
    level = logging.NOTSET if name else logging.WARNING
    return {"handlers": [], "filters": [], "level": level, "propagate": True}


def _state(logger: logging.Logger) -> dict[str, Any]:
    return {
        "handlers": logger.handlers[:],
        "filters": logger.filters[:],
        "level": logger.level,
        "propagate": logger.propagate,
    }


def _set_state(logger: logging.Logger, state: dict[str, Any]) -> None:
    logger.handlers[:], logger.filters[:] = state["handlers"], state["filters"]
    logger.propagate = state["propagate"]
    logger.setLevel(state["level"])


def _all_loggers() -> list[tuple[str, logging.Logger]]:
    root = logging.getLogger()
    found: dict[str, Any] = {"": root, **root.manager.loggerDict}
    return [(k, each) for k, each in found.items() if isinstance(each, logging.Logger)]


def _is_of_library(name: str, modules: OwnModules) -> bool:
    """Whether a logger is: by its name, which is a module's, as "torch.distributed",
    or that of the project, as "DeepSpeed"."""
    top = name.partition(".")[0]
    module = sys.modules.get(top) or sys.modules.get(top.lower())
    if module is None or top == "__main__" or modules.hides(top):
        return False
    return not modules.has_file(getattr(module, "__file__", None))
