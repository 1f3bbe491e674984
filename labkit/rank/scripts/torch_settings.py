"""The settings of torch that change what it computes."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import multiprocessing

from labkit.compat.torch import compiler_settings
from labkit.compat.torch import print_settings

_BACKENDS = (
    *("cuda.matmul.allow_fp16_reduced_precision_reduction",),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction",),
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic"),
    *("cudnn.allow_tf32", "mkldnn.enabled", "mkldnn.deterministic"),
    "quantized.engine",
    # Last: the flags above set some of them, and torch refuses to read a mixture.
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision"),
    *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


class TorchSettings:
    """Those of this process, as they are now."""

    def __init__(self) -> None:
        set_device = torch.set_default_device
        device = torch.get_default_device()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._restore: list[Callable[[], Any]] = [
            partial(torch.set_default_dtype, torch.get_default_dtype()),
            partial(set_device, None if device.type == "cpu" else device),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            partial(torch.set_num_threads, torch.get_num_threads()),
            partial(torch.set_flush_denormal, False),  # torch does not say what it is
            partial(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=warn_only,
            ),
            partial(
                torch.autograd.set_detect_anomaly,
                torch.is_anomaly_enabled(),
                torch.is_anomaly_check_nan_enabled(),
            ),
            *_conversion(),
            partial(
                multiprocessing.set_sharing_strategy,
                multiprocessing.get_sharing_strategy(),
            ),
            print_settings(),
            *compiler_settings(),
        ]
        for kind in _ATTENTION:
            is_on = getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
            enable = getattr(torch.backends.cuda, f"enable_{kind}_sdp")
            self._restore.append(partial(enable, is_on))
        with contextlib.suppress(RuntimeError):  # old and new flags were mixed
            precision = torch.get_float32_matmul_precision()
            self._restore.append(partial(torch.set_float32_matmul_precision, precision))
        self._backends = {}
        for name in _BACKENDS:
            with contextlib.suppress(AttributeError, RuntimeError):
                self._backends[name] = _backend(name)

    def restore(self) -> None:
        """Set them as they were."""
        for each in self._restore:
            each()
        for name, value in self._backends.items():
            with contextlib.suppress(RuntimeError):
                if _backend(name) == value:
                    continue
            owner, _, attribute = name.rpartition(".")
            setattr(_backend(owner), attribute, value)


@contextlib.contextmanager
def interop_threads_again() -> Iterator[None]:
    """In this block their number may be set although an earlier script has: torch
    allows it once in a process. The first number stays, which changes no result."""
    set_once = torch.set_num_interop_threads

    def set_again(nthreads: int) -> None:
        try:
            set_once(nthreads)
        except RuntimeError as error:
            if "set_num_interop_threads called" not in str(error):
                raise

    torch.set_num_interop_threads = set_again
    try:
        yield
    finally:
        torch.set_num_interop_threads = set_once


def _conversion() -> list[Callable[[], Any]]:
    """How `Module.to` and the like change parameters."""
    future = torch.__future__
    return [
        partial(
            future.set_swap_module_params_on_conversion,
            future.get_swap_module_params_on_conversion(),
        ),
        partial(
            future.set_overwrite_module_params_on_conversion,
            future.get_overwrite_module_params_on_conversion(),
        ),
    ]


def _backend(name: str) -> Any:
    found: Any = torch.backends
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found
