"""Adds to errors of libraries what to write instead in a cell."""

import inspect
import re
import traceback
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch

from labkit.rank.telemetry.exceptions import chain
from labkit.rank.telemetry.exceptions import safe_str
from labkit.rank.terminal.keyboard import NO_KEYBOARD

NO_MAGICS = (
    "labkit's magics run in the notebook, not on ranks: put this one into a cell "
    "of its own, without %%dist or %%dist_train"
)
OTHER_DEVICE = (
    "this rank's device is {device}; write `device`, which every cell has, in place of "
    'a number or "cuda": .to(device) instead of .cuda(), and map_location=device in '
    "torch.load. Leave out torch.cuda.set_device and DistributedDataParallel's "
    "device_ids"
)
IN_PARTS = (
    "outside the model's forward pass this strategy keeps parameters as shards "
    "(DTensors), and the loop combines them with plain tensors, for example those of a "
    "copy of the model. Copy the model after prepare, by copy.deepcopy(model): the "
    "copy is in shards as well. Call a whole block of a ModuleList or Sequential, not "
    "a layer of that block; add a penalty that is one number by loss = loss + penalty, "
    "not by loss += penalty; in place of "
    "weight.new_zeros(...) write torch.zeros(..., device=device). To read values use "
    "p.full_tensor() or "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict. Or use ddp, under "
    "which parameters are whole on every rank; single where the loop sets weights or "
    "gradients by what a rank computes of its own samples"
)
MIXED_LIST = (
    "some parameters are in parts (DTensors) and others whole, or in other parts, and "
    "torch's functions for lists of tensors take no mix of these. In place of "
    "nn.utils.clip_grad_norm_ write --clip NORM on the magic line; do other things for "
    "one parameter at a time"
)
PARTIAL_SUMS = (
    "if this is parameter.grad: with --accumulate it is None between the microbatches "
    "of a step, and comes with the last one. Skip parameters whose grad is None, clip "
    "with --clip NORM, or leave out --accumulate"
)
NO_GRADIENTS_YET = (
    "if the loop keeps something of parameter.grad by the parameter's name: with "
    "--accumulate it is None between the microbatches of a step, and comes with the "
    "last one. Have the loop take every parameter that it has not met yet as new, or "
    "leave out --accumulate"
)
NO_GRADIENT = (
    "if this is parameter.grad: no backward pass has reached that parameter since its "
    "gradient was cleared, which under ZeRO the step itself does: read it before "
    "optimizer.step(), or use ddp, under which it stays. Under pipeline a copy of the "
    "model (copy.deepcopy) has none on ranks that have other layers: compute gradients "
    "with the model that prepare returns, or use single"
)
"""Without --accumulate."""
OTHER_PRECISION = (
    "under ZeRO, fsdp and hsdp the layers compute in the dtype of --precision. The "
    "inputs of model(x) are cast to it; buffers, and the inputs of a part or of "
    "another method of the model, are not: cast these, as in x = x.to(torch.bfloat16)"
)
NO_KERNEL = (
    "under ZeRO, fsdp and hsdp the layers compute in the dtype of --precision, and "
    "this device has no such function in that dtype: give it x.float(), or use ddp"
)
NO_NUMPY = (
    "numpy has no such dtype, in which layers compute with --precision bf16, and ZeRO "
    "keeps parameters: write tensor.detach().float().cpu().numpy()"
)
TWICE = (
    "if the loop differentiates a graph twice (retain_graph=True, create_graph=True): "
    "zero3, fsdp and hsdp free parameters that the second pass needs; use ddp, zero1 "
    "or zero2. If it calls the forward method of a layer: write layer(x) in place of "
    "layer.forward(x), or the layer does not gather its parameters. If a layer hands "
    "on what it computes without returning it, for example as an attribute of its own "
    "or in a dict that it is given: have it return that"
)
RETURNED_PARAMETER = (
    "if forward returns a parameter: under zero3 it is in parts when its gradient "
    "comes. Compute in forward what the loss needs of it, or take it from "
    "model.parameters() in the loop"
)
WITHIN_A_PASS = (
    "if this is torch.autograd.grad for parameters within a backward pass, for example "
    "in the torch.autograd.Function of an adjoint method: zero3, fsdp and hsdp gather "
    "a layer's parameters for its own passes, and these are not what such a Function "
    "has kept. Compute it plainly in forward, with --activation-checkpointing to save "
    "memory, or use ddp, zero1 or zero2"
)
PART_OF_BATCH = (
    "each rank gets a part of the global batch, so its size may differ from "
    "batch_size; take the size from the batch that the loop gets, for example "
    "torch.zeros(1, len(inputs), H) for the initial hidden state"
)
ONE_SAMPLE = (
    "a rank's part of a batch may be one sample, of which .squeeze() leaves no "
    "dimension: write .squeeze(1). Or have no such part: drop_last=True, and a batch "
    "size with several samples for each rank"
)
IN_BUCKETS = (
    "under ddp gradients are views of its buckets, which detach_() cannot detach; in "
    "place of p.grad.detach_() and p.grad.zero_() write p.grad = None, or call "
    "optimizer.zero_grad()"
)
FUNCTIONAL = (
    "zero3 partitions the parameters and gathers them in the model's own forward "
    "pass, which does not work with torch.func (functional_call, vmap, grad, jacrev). "
    "If the loop ends in loss.backward(), use ddp, zero1 or zero2; if torch.func "
    "computes the gradients, use single"
)
FORWARD_MODE = (
    "if the model is prepared under pipeline or zero3: ranks exchange tensors in its "
    "forward pass, in ways that torch.func.jvp and the like cannot transform; use ddp, "
    "zero1, zero2 or fsdp"
)
FORWARD_MODE_ON_SHARDS = (
    "if the model is prepared under fsdp or hsdp: its layers gather their parameters "
    "in functions that forward-mode AD (dual_level) does not take; use torch.func.jvp, "
    "or ddp, zero1 or zero2"
)
WHOLE_GRAPH = (
    "a layer that is prepared under this strategy does more in its forward pass than a "
    "compiler can put into one graph: leave out fullgraph=True, or use ddp or fsdp, or "
    "compile only functions that call no layer"
)
NEW_PARAMETER = (
    "a parameter of the model did not exist yet in prepare, for example after "
    "remove_parametrizations, and this strategy has parts only of those that did. Make "
    "the change in a plain model with the trained weights, which %dist_pull model "
    "--full has in the notebook, for plain.load_state_dict(model). (Under "
    "torch.func.functional_call use ddp, zero1 or zero2)"
)
FUNCTIONAL_ON_PARTS = (
    "the ranks that share a layer's parts sum them with collectives, which torch.func "
    "(functional_call, vmap, grad, jacrev) cannot transform. If the loop ends in "
    "loss.backward(), use ddp, zero1 or zero2; if torch.func computes the gradients, "
    "use single"
)
FUNCTIONAL_ON_SHARDS = (
    "if torch.func (functional_call, vmap, grad, jacrev) calls a model that is "
    "prepared under fsdp or hsdp: a layer gathers its parameters in such a call, which "
    "torch.func cannot transform. If the loop ends in loss.backward(), use ddp, zero1 "
    "or zero2; if torch.func computes the gradients, use single"
)
ON_OTHER_STAGES = (
    "under pipeline a tensor between layers is on the rank whose stage computes it; "
    "the others know its shape alone. A function of your own of such tensors, for "
    "example a torch.autograd.Function, has to be in a layer: in a module with "
    "parameters, or one of a torch.nn.Sequential. What a hook of a module gets, such "
    "as its gradients, is on that rank alone, too. Or use ddp"
)
NESTED = (
    "under pipeline a tensor between layers is on the rank whose stage computes it, "
    "and torch.nn.TransformerEncoder packs its input by a mask: make it with "
    "enable_nested_tensor=False, or use ddp"
)
PACKED = (
    "if the model is prepared under pipeline: a tensor between layers is on the rank "
    "whose stage computes it, so no layer there takes a PackedSequence. Give it padded "
    "sequences, and read its output at the last step of each; or use ddp"
)
PARTS_IN_FILE = (
    "if this saves a model by save_pretrained or safetensors: under fsdp, hsdp and "
    "tensor its state_dict() has parts (DTensors). Take whole tensors on all ranks, by "
    "weights = get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict, and call "
    "model.save_pretrained(folder, state_dict=weights)"
)
PICKLED = (
    "if this pickles a model that prepare has returned: with it goes what prepare has "
    "put into it for the run, which no file can hold. Pickle model.state_dict(), or "
    "call save_checkpoint(folder)"
)
SAVED_TENSORS = (
    "if a hook of torch.autograd.graph.saved_tensors_hooks writes a tensor to a file: "
    "under zero3, fsdp and hsdp it gets some with hooks or attributes of the run, "
    "which no file can hold. Write its values alone: torch.save(tensor.detach(), path)"
)
SHARED_WITH_NUMPY = (
    "if the loop, or a hook of torch.autograd.graph.saved_tensors_hooks, has taken "
    ".numpy() of a parameter: numpy has the same memory then, which fsdp and hsdp free "
    "after each pass. Take it of a copy: tensor.detach().clone().numpy()"
)
UNFROZEN = (
    "if the loop has unfrozen a parameter that was frozen in prepare: this strategy "
    "does not support that in bf16 or fp16. Unfreeze before prepare, in a "
    "%%dist_train cell of its own, or use fp32 or ddp. If it has changed the model's "
    "dtype, for example by model.double(): do that before prepare, or use ddp"
)
OTHER_DTYPE = (
    "if the loop has changed the dtype of the model after prepare, for example by "
    "model.float(): ZeRO, fsdp and hsdp keep that of --precision, or of prepare. Leave "
    "the model as it is, or convert it before prepare; to save its weights in another "
    "dtype, convert those of model.state_dict(). Or use ddp"
)
SHARED_MEMORY = (
    "a DataLoader's workers send their batches through shared memory, and /dev/shm has "
    "no room for one more (`df -h /dev/shm`; Docker gives it 64 MB). Start the "
    "container with more, for example docker run --shm-size=8g; or use fewer workers, "
    "a smaller prefetch_factor, or num_workers=0"
)
FORMER_GROUP = (
    "this process group, or what was sharded over it, belongs to the ranks from "
    "before %dist_restart: make it again on all ranks, and load its values from what "
    "save_checkpoint or --checkpoint saved"
)
OTHER_THAN_OURS = (
    "{name} is a variable of your own here, from this cell or one before it, and hides "
    "what labkit calls so: give it another name, and take it back with `del {name}` in "
    "a %%dist cell"
)
HALF_WRITTEN = (
    "if several ranks write this file: one may read it while another has written only "
    "a part of it. torch.save(state, path), with a path and not an open file, replaces "
    "it at once; or write it on rank 0 alone, and have all ranks wait for that, with "
    "dist.barrier(), before they read it"
)
UNKNOWN_OUTPUT = (
    "if this is in forward: under zero3 DeepSpeed looks for tensors in what each "
    "module returns, and cannot look into a number, a string, a set, a generator, an "
    "object with __slots__ or a dict whose keys are no strings. Return a tensor, a "
    "tuple, a dict with names as keys or another object, or use fsdp or ddp"
)
SEVERAL_DTYPES = (
    "a layer or block of the model has parameters of several dtypes, for example "
    "complex ones beside real ones, and fsdp and hsdp shard those of a block as one. "
    "Keep a complex one as torch.view_as_real(w) and use torch.view_as_complex in "
    "forward, or use ddp"
)
SELECTIVE = (
    "if this is torch.utils.checkpoint with a policy "
    "(create_selective_checkpoint_contexts) under zero3, which gathers parameters "
    "within the checkpointed block: the policy is asked about operations of that, too, "
    "and these are not the same in the backward pass. Call checkpoint without "
    "context_fn, or use fsdp, ddp, zero1 or zero2"
)
LISTS_OF_ALL = (
    "if this is in an optimizer's step under pipeline, where it has the parameters of "
    "this rank's stage alone: it keeps a list that it has made of all of them. Let it "
    "keep what it has of a parameter in self.state[p], or use ddp"
)
SYNC_BATCHNORM = (
    "torch's own SyncBatchNorm works on GPUs only. Call convert_sync_batchnorm before "
    "prepare, or leave it out and give --sync-batchnorm on the magic line of a "
    "%%dist_train cell: labkit then computes the statistics, on the CPU, too"
)
HINTS = {
    "of a process group that no longer exists": FORMER_GROUP,
    "is not initialized in the world group map": FORMER_GROUP,
    "is not registered, please create group": FORMER_GROUP,
    "Failed to validate global plan: .* invalid fill": FORMER_GROUP,
    r"unable to \w+ (shared memory|.*file </?torch_)|out of shared memory": (
        SHARED_MEMORY
    ),
    "PytorchStreamReader failed|Ran out of input|unexpected EOF, expected|"
    r"load persistent id instruction|is a zip archive \(did you": HALF_WRITTEN,
    "SyncBatchNorm expected input tensor to be on": SYNC_BATCHNORM,
    "_cuda_setDevice": OTHER_DEVICE,
    "Torch not compiled with CUDA": OTHER_DEVICE,
    "Cannot access accelerator device when none": OTHER_DEVICE,
    "No CUDA GPUs are available": OTHER_DEVICE,
    "Found no NVIDIA driver": OTHER_DEVICE,
    "invalid device ordinal": OTHER_DEVICE,
    "Attempting to deserialize object on a? ?CUDA": OTHER_DEVICE,
    "DistributedDataParallel device_ids": OTHER_DEVICE,
    "frontend does not support input requests": NO_KEYBOARD,
    r"agic (function )?`%%?dist(_\w+)?` not found": NO_MAGICS,
    "attached to a different loop": (
        "on a rank, cells that await have an event loop of their own, and others that "
        "of the process: make the task in the cell that awaits it"
    ),
}
"""What is found in an error's message -> what is added to it. One without a message
stands for itself: its kind, and the module that raised it."""

_TERM = r"'(\w*Tensor|\w*Parameter|float|int|NoneType)'"
"""What a gradient that is None is added to or multiplied by, as an error names it."""

OF_STRATEGIES = {
    r"aten\.(_foreach_\w+|stack)\S* got mixed torch.Tensor and DTensor": MIXED_LIST,
    "All operands in aten.* must have the same mesh": MIXED_LIST,
    r"aten\.(?!_foreach_|stack)\S+ got mixed torch.Tensor and DTensor": IN_PARTS,
    "in-place operations that require placement changes": IN_PARTS,
    r"AssertionError in torch\.distributed\.tensor": IN_PARTS,
    "cannot be performed without redistribution": IN_PARTS,
    "on inputs with different meshes": IN_PARTS,
    "Sharding propagation failed": IN_PARTS,
    "FSDP expects uniform original parameter dtype": SEVERAL_DTYPES,
    r"'NoneType' object has no attribute '(abs|add_|clamp_?|clone|data|detach|div_|"
    r"mean|mul_?|norm|pow|shape|square|sum|view)'": PARTIAL_SUMS,
    r"argument '\w+' \(position \d+\) must be Tensor, not NoneType": PARTIAL_SUMS,
    r"nested_tensorlist\[0\].empty\(\)": PARTIAL_SUMS,
    "stack expects a non-empty TensorList": PARTIAL_SUMS,
    "Tensor list must have at least one tensor": PARTIAL_SUMS,
    r"setStorage: sizes .* out of bounds for storage of size 0": TWICE,
    "mat2 must be a matrix": TWICE,
    "weight should have at least three dimensions": TWICE,
    "active_backward_submodules is empty": TWICE,
    "to match the convolution dimensions, but got stride": TWICE,
    "PreBackwardFunctionForModuleBackward returned an invalid": RETURNED_PARAMETER,
    "ForZeroStage3Backward returned an invalid gradient": WITHIN_A_PASS,
    "appears to not have been used in the graph": WITHIN_A_PASS,
    rf"unsupported operand .*('NoneType' and {_TERM}|{_TERM} and 'NoneT)": PARTIAL_SUMS,
    r"Skip calling `torch.compiler.disable\(\)`d function": WHOLE_GRAPH,
    "expected dtype float for `end` but got dtype": OTHER_PRECISION,
    r"input dtype \(\S+float32\) does not match weight dtype": OTHER_PRECISION,
    r"size of tensor a \(0\) must match": TWICE,
    r"vars\(\) argument must have __dict__ attribute": UNKNOWN_OUTPUT,
    r"'(int|tuple|bool|float)' object has no attribute 'startswith'": UNKNOWN_OUTPUT,
    "attempting to assign a gradient with dtype": UNFROZEN,
    r"Expected hidden(\[\d\])? size": PART_OF_BATCH,
    r"arget size .* input size \(torch\.Size\(\[\]\)\)": ONE_SAMPLE,
    "Can't detach views in-place": IN_BUCKETS,
    "type object 'FSDP.*' has no attribute": NEW_PARAMETER,
    "'Parameter' object has no attribute 'ds_": NEW_PARAMETER,
    "(?<!'Parameter' object )has no attribute 'ds_(tensor|status|id|shape)'": (
        FUNCTIONAL
    ),
    "You must implement the jvp function": FORWARD_MODE,
    "but the jvp is not returning a view": FORWARD_MODE_ON_SHARDS,
    r"in-place operation \(aten::copy_\) that would mutate": FORWARD_MODE,
    r"call Tensor.requires_grad_\(\) .* being transformed by a functorch": FORWARD_MODE,
    "nested_tensor_from_mask": NESTED,
    "but its data is not allocated yet": PACKED,
    r""""\w+" not implemented for '(BFloat16|Half)'""": NO_KERNEL,
    "must be either float or double dtype": NO_KERNEL,
    r"an't (pickle|get) local object .*(Session|DeepSpeed)": PICKLED,
    "an't pickle .*_fsdp_init": PICKLED,
    "cannot pickle 'weakref": PICKLED,
    "cannot pickle '[^']*ProcessGroup": SAVED_TENSORS,
    "Unsupported global: GLOBAL getattr": SAVED_TENSORS,
    "Trying to resize storage that is not resizable": SHARED_WITH_NUMPY,
    "data pointer on an invalid python storage": PARTS_IN_FILE,
    "encountered during backward but not found in storage": SELECTIVE,
    "Tensor lists must have the same number of tensors": LISTS_OF_ALL,
    "Batching rule not implemented for c10d": FUNCTIONAL_ON_PARTS,
    "must override the setup_context staticmethod": FUNCTIONAL_ON_PARTS,
    r"tried to vmap over _?Alias": FUNCTIONAL_ON_PARTS,
    "tried to vmap over (Pre|Post)BackwardFunction": FUNCTIONAL,
    "data pointer of Tensor that doesn't have storage": FUNCTIONAL_ON_SHARDS,
    r"must have the same dtype, but got (Float|float) and BFloat16": OTHER_PRECISION,
    r"must have the same dtype, but got (Float|float) and Half": OTHER_PRECISION,
    r"to have the same dtype, but got: .*(BFloat16|Half)": OTHER_PRECISION,
    r"expected scalar type Float but found (BFloat16|Half)": OTHER_PRECISION,
    "unsupported ScalarType BFloat16": NO_NUMPY,
    r"must have the same dtype, but got (Double|BFloat16|Half) and": OTHER_DTYPE,
    r"Expected out tensor to have dtype \S+, but got": OTHER_DTYPE,
    "Operator .* does not have a sharding strategy registered": IN_PARTS,
    "expected device .* but got meta": ON_OTHER_STAGES,
    r"ensor on device (meta is not on|\S+ is not on the expected device meta)": (
        ON_OTHER_STAGES
    ),
    "(on|with) [Mm]eta tensors|a meta tensor|out of meta tensor": ON_OTHER_STAGES,
}
"""As `HINTS`, where a strategy of labkit's may have prepared the model."""
OF_ACCUMULATION = {
    r"^'?[\w.]+\.(weight|bias)'?$": NO_GRADIENTS_YET,
}
"""As `OF_STRATEGIES`, in a run with --accumulate."""


def add_hint(
    error: BaseException,
    device: torch.device,
    *,
    is_prepared: bool,
    accumulates: bool = False,
    own_names: Iterable[str] = (),
    ours: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Note under `error`, once, what its message does not say; of strategies only where
    one may have prepared what the cell uses. `ours` are labkit's functions by the names
    that the cell has, `own_names` those that the user's variables have."""
    if isinstance(error, TypeError):
        note = ""
        if name := called_wrongly(error, own_names):
            note = OTHER_THAN_OURS.format(name=name)
        elif name := called_wrongly(error, ours or {}):
            note = called_as(name, (ours or {})[name])
        if note and note not in notes_of(error):
            error.add_note(note)
    words = " ".join(safe_str(each) or place(each) for each in chain(error))
    hints = HINTS | OF_STRATEGIES if is_prepared else HINTS
    if is_prepared and accumulates:
        hints = hints | OF_ACCUMULATION
    for found, hint in hints.items():
        if hint is PARTIAL_SUMS and not accumulates:
            hint = NO_GRADIENT
        note = hint.format(device=device)
        if re.search(found, words) and note not in notes_of(error):
            error.add_note(note)


def called_wrongly(error: TypeError, names: Iterable[str]) -> str:
    """Which of `names` the line that has raised calls as it cannot be; "" for none."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    line, said = last[0].line or "" if last else "", safe_str(error)
    for name in names:
        is_of_call = f"{name}() " in said or "is not callable" in said
        if is_of_call and re.search(rf"(?<![\w.]){name}\(", line):
            return name
    return ""


def called_as(name: str, function: Callable[..., Any]) -> str:
    """How a function is called, with its defaults."""
    signature = inspect.signature(function)
    bare = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
    ]
    plain = signature.replace(parameters=bare, return_annotation=signature.empty)
    return f"it is called as {name}{plain}"


def place(error: BaseException) -> str:
    """Its kind, and the module that raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__") if frames else None
    return f"{type(error).__name__} in {module}"


def notes_of(error: BaseException) -> list[str]:
    """What was added to an error's message by `add_note`."""
    return [str(note) for note in getattr(error, "__notes__", [])]
