"""What is added to errors of libraries."""

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from labkit.rank.engine.hints import add_hint
from labkit.rank.engine.hints import notes_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("accumulates", "hint"),
    [
        (True, "and comes with the last one"),
        (False, "which under ZeRO the step itself does"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda gradients: gradients[0].norm(),
        lambda gradients: gradients[0] * 0.5,
        lambda gradients: gradients[0] - gradients[1],
        lambda gradients: torch.zeros_like(gradients[0]),
        lambda gradients: torch.stack([g for g in gradients if g is not None]),
        lambda gradients: torch._foreach_mul_([g for g in gradients if g], 0.5),
    ],
)
def test_a_gradient_that_is_none_is_explained(
    use: Callable[[list[Any]], Any], accumulates: bool, hint: str
) -> None:
    with pytest.raises((AttributeError, TypeError, RuntimeError)) as found:
        use([None, None])
    add_hint(found.value, CPU, is_prepared=True, accumulates=accumulates)
    assert hint in "".join(notes_of(found.value))


def test_a_variable_that_hides_a_name_of_labkits_is_named() -> None:
    log: Any = 4
    with pytest.raises(TypeError) as found:
        log(loss=1.0)
    for _ in range(2):
        add_hint(found.value, CPU, is_prepared=False, own_names=["fit", "log"])
    [note] = notes_of(found.value)
    assert note.startswith("log is a variable of your own here")
    with pytest.raises(TypeError) as other:
        torch.zeros(1).log(loss=1.0)
    add_hint(other.value, CPU, is_prepared=False, own_names=["log"])
    assert notes_of(other.value) == []


@pytest.mark.parametrize(
    ("key", "accumulates", "is_explained"),
    [("0.weight", True, True), ("0.weight", False, False), ("weight", True, False)],
)
def test_a_parameter_without_a_gradient_so_far_is_explained(
    key: str, accumulates: bool, is_explained: bool
) -> None:
    with pytest.raises(KeyError) as found:
        {}[key]
    add_hint(found.value, CPU, is_prepared=True, accumulates=accumulates)
    said = "".join(notes_of(found.value))
    assert ("between the microbatches" in said) is is_explained


def test_how_a_function_of_labkits_is_called_is_said() -> None:
    def fit(model: object, *, epochs: int = 1) -> None: ...

    ours = {"prepare": print, "fit": fit}
    fit.__qualname__ = "fit"
    with pytest.raises(TypeError) as found:
        fit(1, 2)  # type: ignore[misc]
    add_hint(found.value, CPU, is_prepared=False, ours=ours)
    assert notes_of(found.value) == ["it is called as fit(model, *, epochs=1)"]
    with pytest.raises(TypeError) as other:
        fit(len(3))  # type: ignore[arg-type]
    add_hint(other.value, CPU, is_prepared=False, ours=ours)
    assert notes_of(other.value) == []


def test_a_function_that_the_dtype_does_not_have_is_explained() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.linalg.svd(torch.ones(2, 2, dtype=torch.bfloat16))
    add_hint(found.value, CPU, is_prepared=True)
    assert "give it x.float()" in "".join(notes_of(found.value))


def test_parts_that_a_file_cannot_hold_are_explained() -> None:
    class Part(torch.Tensor):
        """Has no memory of its own, as a DTensor has none."""

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **options: Any) -> None:
            """None is called."""

    part = torch.Tensor._make_wrapper_subclass(Part, (2,))
    with pytest.raises(RuntimeError) as found:
        part.untyped_storage().data_ptr()
    add_hint(found.value, CPU, is_prepared=True)
    assert "get_model_state_dict" in "".join(notes_of(found.value))


class Sees:
    def gradient(self) -> None:
        """As fsdp has with some tensors."""


@pytest.mark.parametrize("kept", [Sees().gradient, dist.ProcessGroup(0, 1)])
def test_saved_tensors_that_a_file_cannot_hold_are_explained(kept: Any) -> None:
    def write_and_read(tensor: torch.Tensor) -> None:
        torch.save(tensor, file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()))

    saved: Any = nn.Parameter(torch.ones(2))
    saved.kept = kept
    with pytest.raises((TypeError, pickle.UnpicklingError)) as found:
        write_and_read(saved)
    add_hint(found.value, CPU, is_prepared=True)
    assert "torch.save(tensor.detach(), path)" in "".join(notes_of(found.value))
    write_and_read(saved.detach())


def test_memory_that_numpy_has_too_is_explained() -> None:
    tensor = torch.ones(2)
    _ = tensor.numpy()
    with pytest.raises(RuntimeError) as found:
        tensor.untyped_storage().resize_(0)
    add_hint(found.value, CPU, is_prepared=True)
    assert "tensor.detach().clone().numpy()" in "".join(notes_of(found.value))


def test_strategies_are_no_explanation_where_none_has_prepared_a_model() -> None:
    with pytest.raises(RuntimeError, match="mat2 must be a matrix") as found:
        torch.ones(2, 2).mm(torch.ones(2))
    add_hint(found.value, CPU, is_prepared=False)
    assert notes_of(found.value) == []


def test_what_dtensors_cannot_do_is_explained() -> None:
    # As of p.grad.flatten() under fsdp, where ranks have parts of unequal size.
    error = RuntimeError(
        "Cannot flatten unevenly sharded tensor: dimension 0 (size 3) is not evenly "
        "divisible by mesh dimension 0 (size 2). Please redistribute the tensor before "
        "this operation.\n\nSharding propagation failed for aten.view.default(...)"
    )
    add_hint(error, CPU, is_prepared=True)
    [hint] = notes_of(error)
    assert "p.full_tensor()" in hint


def test_products_of_two_dtypes_are_explained() -> None:
    # As of a buffer, which torch's `orthogonal` has, with weights in bf16.
    one, other = torch.ones(2, 2), torch.ones(2, 2).bfloat16()
    for left, right in ((one, other), (other, one)):
        with pytest.raises(RuntimeError) as found:
            left @ right
        add_hint(found.value, CPU, is_prepared=True)
        assert "buffers" in "".join(notes_of(found.value))


def test_several_dtypes_in_a_block_are_explained() -> None:
    error = AssertionError(
        "FSDP expects uniform original parameter dtype but got "
        "{torch.float32, torch.complex64}"
    )
    add_hint(error, CPU, is_prepared=True)
    assert "torch.view_as_real" in "".join(notes_of(error))


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        (
            lambda: torch.sparse.mm(
                torch.eye(2).to_sparse(), torch.ones(2, 2, dtype=torch.bfloat16)
            ),
            "buffers, and the inputs of a part",
        ),
        (
            lambda: torch.nn.LSTM(2, 2, dtype=torch.bfloat16)(torch.ones(1, 2)),
            "the inputs of a part or of another method",
        ),
        (
            lambda: torch.ones(2, dtype=torch.bfloat16).numpy(),
            "write tensor.detach().float().cpu().numpy()",
        ),
    ],
)
def test_a_dtype_of_precision_is_explained(use: Callable[[], Any], hint: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as found:
        use()
    add_hint(found.value, CPU, is_prepared=True)
    assert hint in "".join(notes_of(found.value))


def test_a_tensor_of_another_stage_is_explained() -> None:
    here, elsewhere = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    for tensors in ((elsewhere, here, here), (here, elsewhere, elsewhere)):
        with pytest.raises(RuntimeError) as found:
            torch.addmm(*tensors)
        add_hint(found.value, CPU, is_prepared=True)
        assert "under pipeline a tensor between" in "".join(notes_of(found.value))


def test_an_operator_that_has_no_shape_alone_is_explained() -> None:
    with pytest.raises(NotImplementedError) as found:
        torch.bincount(torch.ones(2, dtype=torch.long, device="meta"))
    add_hint(found.value, CPU, is_prepared=True)
    assert "under pipeline a tensor between" in "".join(notes_of(found.value))


def test_a_checkpoint_with_a_policy_over_gathered_parameters_is_explained() -> None:
    made = iter((False, True))

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() if next(made) else x.cos()) @ x.exp()

    x = torch.ones(2, 2, requires_grad=True)
    keep = functools.partial(
        create_selective_checkpoint_contexts,
        lambda *_, **__: CheckpointPolicy.MUST_SAVE,
    )
    y = checkpoint(block, x, use_reentrant=False, context_fn=keep)
    with pytest.raises(RuntimeError) as found:
        y.sum().backward()
    add_hint(found.value, CPU, is_prepared=True)
    assert "without context_fn" in "".join(notes_of(found.value))


def test_a_list_of_the_parameters_of_all_stages_is_explained() -> None:
    two, three = [torch.ones(2)] * 2, [torch.ones(2)] * 3
    with pytest.raises(RuntimeError) as found:
        torch._foreach_add_(two, three)
    add_hint(found.value, CPU, is_prepared=True)
    assert "of all of them" in "".join(notes_of(found.value))
