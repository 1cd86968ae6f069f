"""Models whose weights FSDP2 gathers in FP8, beside the same models gathered in BF16, without a trainer.

Runs in a world of two processes; `shard_run.py` calls it. Says of each case whether the two were equal bit for bit.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from builders import VOCABULARY, build_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trl_fp8.float8 import convert_model, high_precision
from trl_fp8.float8.all_gather import GatheredFloat8Linear, refresh_scales
from trl_fp8.rollout import adapters


CASES = {
    "fused": {"fused": True},
    "power_of_2": {"scale_rounding": "power_of_2"},
    "bf16 masters": {"dtype": torch.bfloat16},
    "fp32 run": {"compute": torch.float32},
    "reentrant": {"checkpointing": True},
    "not reentrant": {"checkpointing": False},
    "frozen": {"frozen": True},
}


def build(case: dict, kind: str) -> nn.Module:
    """`kind`: `"gathered"`, `"stock"` (FP8 made of BF16 weights) or `"plain"` (no FP8)."""
    model = build_model().to(case.get("dtype", torch.float32))
    if kind != "plain":
        rounding = case.get("scale_rounding", "none")
        convert_model(model, "tensorwise", scale_rounding=rounding, fsdp_all_gather=kind == "gathered")
    if "checkpointing" in case:
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"]})
        model.enable_input_require_grads()
    if case.get("frozen"):  # all but the norms
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    policy = MixedPrecisionPolicy(param_dtype=case.get("compute", torch.bfloat16))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def reshard(model: nn.Module) -> None:
    """FSDP2 leaves the root's parameters whole after a pass without gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_layers(model: nn.Module) -> list[GatheredFloat8Linear]:
    return [module for module in model.modules() if isinstance(module, GatheredFloat8Linear)]


def scales_are_fresh(model: nn.Module) -> bool:
    return all(bool(layer._amax == layer.weight.full_tensor().abs().max()) for layer in gathered_layers(model))


def logits(model: nn.Module, ids: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", compute, enabled=compute != torch.float32):
        output = model(ids).logits
    return output


def follow(case: dict, steps: int = 2) -> dict[str, bool]:
    """Train both models; the reference pass is made between forward and backward, on weights that have moved."""
    compute = case.get("compute", torch.bfloat16)
    ids = torch.randint(3, len(VOCABULARY), (4, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {kind: build(case, kind) for kind in ("gathered", "stock", "plain")}
    pair = [models["gathered"], models["stock"]]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=case.get("fused", False)) for model in pair]
    equal = dict.fromkeys(("loss", "gradients", "weights", "reference", "amax"), True)
    for _ in range(steps):
        losses, references = [], []
        for model in pair:
            model.train()
            with torch.autocast("cpu", compute, enabled=compute != torch.float32):
                losses.append(model(ids, labels=ids).loss)
            with high_precision(model):
                references.append(logits(model, ids, compute))
            losses[-1].backward()
        reshard(models["plain"])
        with torch.no_grad():
            for target, source in zip(models["plain"].parameters(), pair[1].parameters(), strict=True):
                target.copy_(source)
        expected = logits(models["plain"], ids, compute)
        equal["loss"] &= torch.equal(*losses)
        equal["reference"] &= all(torch.equal(found, expected) for found in references)
        for ours, theirs in zip(*(model.parameters() for model in pair), strict=True):
            equal["weights"] &= torch.equal(ours.full_tensor(), theirs.full_tensor())
            assert (ours.grad is None) == (theirs.grad is None) == (not ours.requires_grad)
            if ours.grad is not None:
                equal["gradients"] &= torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        refresh_scales(pair[0].modules())
        equal["amax"] &= scales_are_fresh(pair[0])
    return equal


def changed_weights() -> dict[str, bool]:
    """Whether a gather finds the new scale after each way of changing weights that calls no `refresh_scales`."""
    ids = torch.randint(3, len(VOCABULARY), (4, 12), generator=torch.Generator().manual_seed(0))
    found = {}

    def after(change: str, model: nn.Module) -> None:
        found[f"{change}: stale before"] = not scales_are_fresh(model)
        logits(model, ids, torch.bfloat16)
        reshard(model)
        found[change] = scales_are_fresh(model)

    model = build({}, "gathered")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    after("optimizer", model)
    saved = model.state_dict()
    found["a state dict gives ordinary tensors"] = all(type(t.full_tensor()) is torch.Tensor for t in saved.values())
    other = build({}, "gathered")
    logits(other, ids, torch.bfloat16)
    reshard(other)
    other.load_state_dict(saved)
    after("load_state_dict", other)
    same = zip(model.parameters(), other.parameters(), strict=True)
    found["weights are those of the state dict"] = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in same)
    with high_precision(other), pytest.raises(RuntimeError, match="Run the pass under torch.no_grad"):
        other(ids)
    return found


def merged_adapters() -> dict[str, bool]:
    """The weight sync under FSDP2: adapters merged into copies of the sharded weights, which are then gathered."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    ids, seen = torch.full((2, 8), 5), []
    untouched = True
    for gather in (True, False):
        torch.manual_seed(0)
        model: nn.Module = get_peft_model(build_model(), lora)
        whole = copy.deepcopy(model)
        convert_model(model, "tensorwise", fsdp_all_gather=gather)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        before = logits(model, ids, torch.float32)
        reshard(model)
        with adapters.merging_into_copies(model):
            model.merge_adapter()
            weights = [p.full_tensor() for name, p in model.named_parameters() if "base_layer" in name]
            model.unmerge_adapter()
        now = [p.full_tensor() for p in model.parameters()]
        untouched &= all(map(torch.equal, now, whole.parameters()))
        untouched &= torch.equal(before, logits(model, ids, torch.float32))
        whole.merge_adapter()
        seen.append(weights)
    merged = [p.data for name, p in whole.named_parameters() if "base_layer" in name]
    return {
        "merged adapters": all(torch.equal(a, b) for a, b in zip(*seen, strict=True)),
        "as one process merges them": all(torch.allclose(a, b) for a, b in zip(seen[0], merged, strict=True)),
        "ordinary": {type(t) for t in seen[0]} == {torch.Tensor},
        "policy untouched": untouched,
    }


def gathered_memory(model: nn.Module) -> dict[torch.dtype, int]:
    """Bytes that gathered linear weights of the decoder layers take on this rank, by the type they travelled in."""
    found = {}
    for layer in model.model.layers:
        for group in layer._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                if parameter._param_fqn.endswith("_proj.weight"):
                    for output in parameter.all_gather_outputs:
                        found[output.dtype] = found.get(output.dtype, 0) + output.untyped_storage().size()
    return found


def collectives_per_refresh(model: nn.Module) -> int:
    with torch.profiler.profile() as profile:
        assert refresh_scales(model.modules()) == 14
    return sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")


def gather_run() -> dict:
    """Everything above, as `{case: {what: equal}}` and single values."""
    model = build({}, "gathered")
    ids, seen = torch.full((2, 8), 5), []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(gathered_memory(model)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    hook.remove()
    seen.append(gathered_memory(model))
    loss.backward()
    return {
        "in the first layer": seen[0],
        "before the backward pass": seen[1],
        "collectives": collectives_per_refresh(model),
        "cases": {name: follow(case) for name, case in CASES.items()},
        "changed": changed_weights() | merged_adapters(),
    }
