"""What every strategy makes of a model and its optimizer; on its own, `single`."""

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from labkit.records import ModelFacts
from labkit.records import TrainOptions
from labkit.strategies import states
from labkit.strategies.states import Named
from labkit.strategies.states import Restore
from labkit.strategies.states import Source

Tensors = Iterable[torch.Tensor | None]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Prepared:
    """A model and its optimizer under a strategy.

    `model` is what the loop calls, `module` the user's own inside of it, `optimizer`
    the user's own, over what of the parameters this rank updates. This class is the
    strategy `single`; the others change the methods that they do otherwise.
    """

    keeps_gradients = False
    """Whether all gradients are there at once only within the backward pass."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        options: TrainOptions,
    ) -> None:
        self.module = module
        self.model: Any = module
        self.optimizer = optimizer
        self.device = device
        self.options = options
        self.dtype = DTYPES[options.precision]
        self.scaler: torch.amp.GradScaler | None = None
        """Scales an fp16 loss, so that small gradients do not vanish."""
        self.num_shards = 1
        """Ranks that share one copy of what this strategy shards."""
        self.replica_group = 0
        """Ranks of the same group hold replicas of each other."""
        self._handles: list[Any] = []
        parameters = list(module.parameters())
        self._num_parameters = sum(p.numel() for p in parameters)
        self._num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
        # Now, for the strategy may put others in the place of the parameters.
        self._names = states.parameter_names(module, optimizer)
        self.wrap()

    def wrap(self) -> None:
        """Make `model` of `module`, and `optimizer` fit it. May be collective."""
        check_keys(self.options.config, [], "single")
        self.autocast()

    def begin_microbatch(self, *, is_last: bool) -> None:
        """The next forward and backward pass is, or is not, its step's last one."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` as the backward pass is to begin with it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self) -> float | None:
        """Clip the gradients and update the parameters; the norm before clipping."""
        norm = None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.options.clip is not None:
            norm = self.clip(self.options.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is `max_norm` at most.

        The norm is that of the whole gradient, also where a rank has only a shard.
        """
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def memory(self) -> dict[str, Tensors]:
        """The tensors that hold this rank's model states right now, by component."""
        return {
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "gradients": [parameter.grad for parameter in self.module.parameters()],
            "optimizer_state": optimizer_tensors(self.optimizer),
        }

    def facts(self) -> ModelFacts:
        """What theory computes the model states from."""
        state = sum(
            t.numel() * t.element_size() for t in optimizer_tensors(self.optimizer)
        )
        per_element = state / max(1, sum(tensor.numel() for tensor in self.updated()))
        return ModelFacts(
            self._num_parameters, self._num_trainable, per_element, self.num_shards
        )

    def updated(self) -> Iterable[torch.Tensor]:
        """What the optimizer updates on this rank."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def replicas(self) -> dict[str, torch.Tensor]:
        """By name, what must be equal on all ranks of this rank's replica group."""
        return {}

    def checkpoint(
        self, *, with_optimizer: bool = True
    ) -> tuple[Named, dict[str, Any]]:
        """This rank's part of the states, as `labkit.strategies.states` names them, and
        what else there is to them. May be collective."""
        tensors = states.model_states(self.module)
        if not with_optimizer:
            return tensors, {}
        values = self.settings()
        return tensors | states.optimizer_states(self.optimizer, self._names), values

    def restore(self, source: Source, values: Mapping[str, Any]) -> None:
        """Set the states to what `checkpoint` gave, of any strategy. May be collective.

        Raises ValueError, and changes nothing, where they do not fit.
        """
        self.restoring(source, values)()

    def restoring(
        self,
        source: Source,
        values: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
    ) -> Restore:
        """What `restore` does once all has been found to fit."""
        optimizer = self.optimizer if with_optimizer else None
        restore = states.restoring(source, values, self.module, optimizer, self._names)

        def restore_all() -> None:
            restore()
            if with_optimizer:
                self.restore_scaler(values)

        return restore_all

    def settings(self) -> dict[str, Any]:
        """What there is to the states besides tensors."""
        found = states.hyperparameters(self.optimizer, self._names)
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        return found

    def restore_scaler(self, values: Mapping[str, Any]) -> None:
        """Set the loss scaler, if there is one, to what was saved of one."""
        if self.scaler is not None and values.get("scaler"):
            saved = {**self.scaler.state_dict(), **values["scaler"]}
            self.scaler.load_state_dict(saved)

    def close(self) -> None:
        """Take back what only this run needed of the model."""
        for handle in self._handles:
            handle.remove()

    def autocast(self) -> None:
        """Compute the forward pass in `--precision`; parameters stay in fp32.

        Source: `torch.autocast`; Micikevicius et al., "Mixed Precision Training".
        """
        if self.options.precision == "fp32":
            return
        if self.options.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        entered = contextlib.ExitStack()

        def enter(module: nn.Module, args: Any) -> None:
            entered.enter_context(torch.autocast(self.device.type, dtype=self.dtype))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            entered.close()
            return cast_floats(output, torch.float32)

        self._handles += [
            self.model.register_forward_pre_hook(enter),
            self.model.register_forward_hook(leave, always_call=True),
        ]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A structure with its floating-point tensors in `dtype`."""
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


def check_keys(config: Mapping[str, Any], known: Iterable[str], taker: str) -> None:
    """ValueError that lists the keys `taker` knows, if `config` has others."""
    known = list(known)
    if unknown := [key for key in config if key not in known]:
        says = f"it knows: {', '.join(sorted(known))}" if known else "it takes none"
        raise ValueError(f"--config: {taker} has no {unknown[0]!r}; {says}")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a model is a sequence of: the children of its outermost
    ModuleLists and Sequentials, as a transformer's blocks. The units in which
    parameters are gathered, and activations computed again.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                visit(child)
            elif isinstance(module, nn.ModuleList | nn.Sequential):
                if any(True for _ in child.parameters()):
                    found.append(child)
            else:
                visit(child)

    visit(model)
    return found
