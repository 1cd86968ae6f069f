"""The only door to private or non-public names of torchao, peft, trl and transformers.

Each entry says why it is needed, the versions it was checked against, and what removes it. `tests/test_upstream.py`
holds the contract of every one.
"""

from torch import nn

# torchao 0.18: `Float8Linear` and `matmul_with_hp_or_float8_args` are "not public API". Needed because the stock
# forward never casts the weight and reads the GPU's autocast dtype on every device (float8_linear.py, `forward`).
# Delete when torchao follows `torch.is_autocast_enabled(device_type)` and lets a layer be switched to high precision.
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_linear_utils import swap_linear_layers


__all__ = [
    "HF_OVERRIDES",
    "TRL_OVERRIDES",
    "Float8Linear",
    "Float8LinearConfig",
    "adapter_modules",
    "matmul_with_hp_or_float8_args",
    "module_hooks",
    "swap_linear_layers",
]

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
}

# transformers 5.24: `Trainer._load_callback_state` replaces an exportable callback by one built from the checkpoint's
# constructor arguments when `restore_callback_states_from_checkpoint` is set, so the arguments of the old run would
# win over those of the new one. Delete when HF restores into the callback that was passed.
HF_OVERRIDES = {"_load_callback_state": ("self",)}


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
