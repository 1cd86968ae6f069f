"""The door to private or non-public names of torch, torchao, peft, trl and transformers (vLLM: `rollout/_upstream`).

Each entry says why it is needed, the versions it was checked against, and what removes it. `tests/test_upstream.py`
holds the contract of every one.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

# torchao 0.18: `Float8Linear` and `matmul_with_hp_or_float8_args` are "not public API". Needed because the stock
# forward never casts the weight and reads the GPU's autocast dtype on every device (float8_linear.py, `forward`).
# Delete when torchao follows `torch.is_autocast_enabled(device_type)` and lets a layer be switched to high precision.
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_linear_utils import swap_linear_layers

# torchao 0.18: the table its FP8 tensors dispatch by, for `decode_emulated_matmuls_by`.
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    choose_scaled_mm_config,
    hp_tensor_and_scale_to_float8,
)

# torchao 0.18: from max |X| to its scale, for weights of which a rank holds a part. Delete with `quantize_shard`.
from torchao.float8.float8_utils import amax_to_scale

# transformers 5.24: what deletes old checkpoints. Delete when transformers writes them atomically.
from transformers.trainer_utils import rotate_checkpoints

# trl 1.16: the only way to run one pass without reentrant checkpointing, which warns where nothing needs a gradient.
# Delete when TRL or transformers export it.
from trl.models.utils import disable_gradient_checkpointing


# trl 1.16: methods of `GRPOTrainer` that `FP8GRPOTrainer` overrides and calls through `super()`, with the parameters
# it relies on. TRL documents subclassing as the way to extend a trainer but keeps the names private. Delete an entry
# when TRL has a public hook for it.
TRL_OVERRIDES = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "compute_entropy", "compute_aux_loss"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "get_off_policy_mask": (
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
    "get_high_entropy_mask": ("self", "entropies", "mask", "threshold"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "log": ("self", "logs", "start_time"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
}

# transformers 5.24: `Trainer._load_callback_state` replaces an exportable callback by one built from the checkpoint's
# constructor arguments when `restore_callback_states_from_checkpoint` is set, so the arguments of the old run would
# win over those of the new one. Delete when HF restores into the callback that was passed. `_save_checkpoint` and
# `train`: with `rotate_checkpoints`.
HF_OVERRIDES = {
    "_load_callback_state": ("self",),
    "_save_checkpoint": ("self", "model", "trial"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}

# Private attributes of the trainer's parents that we read through self, overrides apart -> the class they are of.
# trl 1.16: TRL's count of micro-batches is the only one that knows where a generation batch ends. transformers 5.24:
# where a checkpoint goes, with `rotate_checkpoints`.
PARENT_ATTRIBUTES = {"_step": "GRPOTrainer", "_get_output_dir": "Trainer"}

# torch 2.11-2.13: what torch's own subclasses set as `__torch_function__` to leave all to `__torch_dispatch__`
# (torchao does so too). Delete when it has a public name.
disabled_torch_function = cast(Any, torch._C._disabled_torch_function_impl)

# torch 2.11-2.13: by these operations, some under private names, FSDP2 cuts, pads and moves a parameter, and
# `nn.Parameter`, `Module.to` and `deepcopy` make a new one. Delete when FSDP2 asks the layer, not the parameter.
_aten = torch.ops.aten
FSDP2_OPERATIONS = {
    _aten.new_zeros.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.split.Tensor,
    _aten.slice.Tensor,
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}


def version(tensor: Tensor) -> int:
    """How often `tensor` was changed in place: autograd's counter (torch 2.11-2.13), which has no public name."""
    return tensor._version


def without_view(tensor: Tensor) -> Tensor:
    """What `tensor` is a view of, where both have one shape, else `tensor` (torch 2.11-2.13).

    torchao 0.18 returns a view of its matmul's output, and autograd forbids to change those in place (OLMo's clamp,
    AdaLoRA). Delete when torchao returns the output itself.
    """
    base = tensor._base
    return tensor if base is None or base.shape != tensor.shape else base


def compile_up_to(num_graphs: int) -> None:
    """Let dynamo keep `num_graphs` graphs of a function, and leave each whole under DDP, for this process.

    DDP would cut each layer's graph at its buckets, and cannot cut one that recomputes activations (pytorch#104674).
    Layers are small enough for gradients to overlap with the backward pass uncut. torch 2.11-2.13: the settings are
    in `torch._dynamo.config` only. Delete when `torch.compile` takes them.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False
    config.recompile_limit = max(config.recompile_limit, num_graphs)


_torchao_matmul = FLOAT8_OPS_TABLE[torch.ops.aten.mm.default]


def decode_emulated_matmuls_by(decode: Callable[[Tensor], Tensor]) -> None:
    """Let torchao's emulated matmuls on CPUs read FP8 values by `decode`, for this process; the last caller wins.

    torchao 0.18 casts each operand, one value after another on a CPU, and has no hook for it; other matmuls stay its
    own. Delete when torch casts FP8 to FP32 in vectors on CPUs.
    """

    def matmul(op: Any, args: tuple, kwargs: dict | None = None) -> Tensor:
        a, b = args
        configs = a._gemm_input_role, a._linear_mm_config, b._gemm_input_role, b._linear_mm_config
        if not choose_scaled_mm_config(*configs).emulate or a.device.type != "cpu":
            return _torchao_matmul(op, args, kwargs)
        return torch.mm(decode(a._data) / a._scale, decode(b._data) / b._scale).to(a._orig_dtype)

    FLOAT8_OPS_TABLE[torch.ops.aten.mm.default] = matmul


def blockwise_kernels() -> Any:
    """torchao 0.18's module of blockwise Triton kernels. A prototype without promises, whose import needs Triton."""
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except ImportError as error:
        raise ImportError(
            "fp8_recipe='blockwise' on FP8 kernels imports torchao.prototype.blockwise_fp8_training, which failed "
            f"({error}). Install torchao 0.18 and triton, or set fp8_emulate=True."
        ) from error
    return kernels


@functools.cache
def _blockwise_function() -> Any:
    kernels = blockwise_kernels()
    from torchao.prototype.blockwise_fp8_training.linear import _run_blockwise_mm, fp8_blockwise_mm

    class BlockwiseMatmul(fp8_blockwise_mm):
        @staticmethod
        def backward(ctx, grad_output):
            if ctx.needs_input_grad[1]:
                return fp8_blockwise_mm.backward(ctx, grad_output)
            grad, grad_scale = kernels.triton_fp8_blockwise_act_quant_lhs(grad_output.contiguous(), ctx.block_size)
            blocks, blocks_scale = kernels.triton_fp8_blockwise_weight_quant_rhs(
                ctx.saved_tensors[1], block_size=ctx.block_size
            )
            grad_x = _run_blockwise_mm(
                use_triton=ctx.use_triton,
                triton_kernel=kernels.triton_fp8_gemm_1x128_128x128,
                mat_a=grad,
                mat_b=blocks,
                scale_a=grad_scale,
                scale_recipe_a=kernels.BLOCKWISE_1X128_SCALING_TYPE,
                scale_b=blocks_scale,
                scale_recipe_b=kernels.BLOCKWISE_128X128_SCALING_TYPE,
                out_dtype=ctx.out_dtype,
            )
            return grad_x, None, None, None, None

    return BlockwiseMatmul


def blockwise_matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x `(M, K)` times weight `(N, K)` transposed by torchao's blockwise training kernels, `(M, N)` in `dtype`.

    torchao 0.18, `torchao.prototype.blockwise_fp8_training`. Its backward computes the gradient of a frozen weight as
    well, so that case is cut short with its own kernels.
    Delete when torchao skips frozen weights.
    """
    return _blockwise_function().apply(x, weight, 128, dtype, False)


def quantize_shard(
    rows: Tensor, scale: Tensor, dtype: torch.dtype, mm_config: Any
) -> tuple[tuple[Tensor], tuple[Tensor, Any]]:
    """Rows of a weight in FP8, as what FSDP2 gathers and the metadata of [`gathered_weight`].

    torchao 0.18, `float8/fsdp_utils.py`, whose tensor class names itself in every operation and so has no subclasses.
    Delete both when it rounds to the compute dtype first and precomputes power-of-two scales.
    """
    quantized = hp_tensor_and_scale_to_float8(rows, scale, dtype, mm_config, GemmInputRole.WEIGHT)
    return (quantized._data,), (scale, mm_config)


def gathered_weight(
    gathered: tuple[Tensor], metadata: tuple[Tensor, Any], dtype: torch.dtype, out: Any
) -> tuple[Tensor, tuple[Tensor]] | None:
    """An FP8 tensor on `gathered` for FSDP2, or the new scale for the one that is on it already (`out`)."""
    (data,), (scale, mm_config) = gathered, metadata
    if out is not None:
        out._scale = scale
        return None
    weight = cast(Any, Float8TrainingTensor)(data, scale, dtype, mm_config, GemmInputRole.WEIGHT)
    return weight, (data,)


def adapter_modules(model: nn.Module) -> set[int]:
    """Ids of the modules inside PEFT tuner layers other than their base layer (peft 0.21, `BaseTunerLayer`).

    `peft.tuners.tuners_utils` is where PEFT itself tells others to import `BaseTunerLayer` from (TRL does). Empty
    without PEFT.
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return set()
    ids: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            base = {id(module) for module in layer.get_base_layer().modules()}
            ids |= {id(module) for module in layer.modules()} - base - {id(layer)}
    return ids


def module_hooks(module: nn.Module) -> list[str]:
    """What hangs on `module` and would be lost by replacing it (torch 2.11-2.13, accelerate 1.15).

    torch has no public query for registered hooks. accelerate's offloading and device hooks set `_hf_hook` and shadow
    `forward` on the instance. Delete when torch can list the hooks of a module.
    """
    names = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_hf_hook",
    )
    found = [name.strip("_").replace("_", " ") for name in names if getattr(module, name, None)]
    if "forward" in vars(module):
        found.append("a replaced forward")
    if hasattr(module, "parametrizations"):
        found.append("a parametrisation")
    return found
