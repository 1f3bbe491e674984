"""What a study may try: a dict of ranges as Optuna's distributions, and what fits."""

import inspect
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from labkit.checks import UserError
from labkit.checks import check_pushed_name
from labkit.checks import is_int
from labkit.checks import is_number
from labkit.checks import short_repr
from labkit.records import format_bytes
from labkit.strategies import find_strategy

HOW = (
    'write (low, high), (low, high, "log"), (low, high, step) with a number, or a list '
    "of choices"
)


def load_optuna() -> Any:
    """Optuna, which says nothing by itself. UserError where it is not installed."""
    try:
        with warnings.catch_warnings():
            # Of tqdm, where ipywidgets is not installed: no bar of its is shown here.
            warnings.filterwarnings("ignore", "IProgress not found")
            import optuna
    except ImportError as error:
        raise UserError(
            "studies are made with Optuna, which is not installed here: "
            'pip install "labkit[tune]"'
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distributions_of(space: Any) -> dict[str, Any]:
    """Optuna's distributions by name. ValueError for what is no space."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError(
            f"space is {short_repr(space)}; give a dict of ranges by parameter, for "
            'example {"lr": (1e-4, 1e-1, "log"), "width": [32, 64]}'
        )
    for name in space:
        if not isinstance(name, str):
            raise ValueError(
                f"{short_repr(name)} cannot be a parameter's name; use a string"
            )
        check_pushed_name(name)
    return {name: distribution_of(name, ranges) for name, ranges in space.items()}


def check_strategies(ranges: Mapping[str, Any]) -> None:
    """ValueError for "strategy" in the space with what is no strategy."""
    if "strategy" not in ranges:
        return
    choices = getattr(ranges["strategy"], "choices", None)
    if choices is None:
        raise ValueError(
            "space['strategy'] is a range; give a list of strategies, for "
            'example ["ddp", "fsdp"]'
        )
    for name in choices:
        find_strategy(name)


def check_grid(ranges: Mapping[str, Any]) -> None:
    """ValueError unless all of these are lists of choices."""
    for name, each in ranges.items():
        if not hasattr(each, "choices"):
            raise ValueError(
                f"sampler 'grid' tries all choices, and {name} is a range; give a list "
                "of values, or choose another sampler"
            )


def distribution_of(name: str, values: Any) -> Any:
    """Optuna's distribution for the ranges of one parameter."""
    distributions = load_optuna().distributions
    if isinstance(values, distributions.BaseDistribution):
        return values
    if isinstance(values, list) and values:
        wrong = [
            v for v in values if not isinstance(v, bool | int | float | str | None)
        ]
        if wrong:
            raise ValueError(
                f"space[{name!r}] has the choice {short_repr(wrong[0])}; choices are "
                "numbers, strings, True, False and None: name what is more than that, "
                "and look it up in the function"
            )
        return distributions.CategoricalDistribution(values)
    if not isinstance(values, tuple) or len(values) not in (2, 3):
        raise ValueError(f"space[{name!r}] is {short_repr(values)}; {HOW}")
    low, high, *more = values
    step = more[0] if more and more != ["log"] else None
    is_right = is_number(low) and is_number(high) and low < high
    if not is_right or not (step is None or (is_number(step) and step > 0)):
        raise ValueError(
            f"space[{name!r}] is {short_repr(values)}, and low has to be less than "
            f"high; {HOW}"
        )
    if more == ["log"] and low <= 0:
        raise ValueError(
            f'space[{name!r}] is {short_repr(values)}: with "log" low is more than 0'
        )
    if is_int(low) and is_int(high) and (step is None or is_int(step)):
        return distributions.IntDistribution(
            low, high, log=more == ["log"], step=1 if step is None else step
        )
    return distributions.FloatDistribution(low, high, log=more == ["log"], step=step)


def check_fits(fits: Any, ranges: Mapping[str, Any]) -> None:
    """ValueError unless `fits` makes a model of some of the parameters."""
    if not callable(fits):
        raise ValueError(
            f"fits is {short_repr(fits)}; give a function that takes parameters of the "
            "space by name, and returns the plain model, or (model, x) with a batch of "
            "its input"
        )
    names = inspect.signature(fits).parameters
    needed = [n for n, each in names.items() if each.default is each.empty]
    if missing := [name for name in needed if name not in ranges]:
        raise ValueError(
            f"fits takes {', '.join(missing)}, which the space does not have; add it "
            "to the space, or give it a default value"
        )


def why_not(
    fits: Callable[..., Any],
    estimate: Callable[..., Any],
    params: Mapping[str, Any],
    strategy: str,
    run_options: Mapping[str, Any],
) -> str:
    """Why a run with these parameters is forecast not to fit; "" where it may.

    `estimate` is `Lab.estimate`. What it does not know, as `raw`, may fit.
    """
    taken = inspect.signature(fits).parameters
    made = fits(**{name: params[name] for name in taken if name in params})
    model, x = made if isinstance(made, tuple) else (made, None)
    names = ("precision", "accumulate", "activation_checkpointing")
    options = {name: run_options[name] for name in names if name in run_options}
    size = params.get("batch_size")
    forecast = estimate(model, x, batch_size=size, **options)
    mesh = run_options.get("mesh")
    rows = forecast.table.droplevel(0)
    ours = [
        name
        for name in rows.index
        if name == strategy
        or (name.startswith(f"{strategy} --mesh") and mesh in (None, name.split()[-1]))
    ]
    fits_or_not = [rows.loc[name, "fits"] for name in ours]  # None: not known
    if not ours or any(each is None or bool(each) for each in fits_or_not):
        return ""
    peak = format_bytes(min(rows.loc[name, "total_peak"] for name in ours))
    return f"forecast {peak} of {format_bytes(forecast.device_bytes)}"
