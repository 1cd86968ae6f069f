"""Real FP8 kernels against the emulation, on the layer shapes of Qwen3-8B, and a short GRPO run on them.

For each recipe and layer shape the same BF16 operands go through the real kernels and the emulation: output, grad_x
and grad_W must agree within accumulation error (SQNR in dB), and the scales bit for bit. Times are forward + backward,
against a BF16 `nn.Linear`. Prints a table and one JSON line; exits 1 when a check fails. `--dry-run` goes through the
same steps on a CPU with small shapes, where "real" is emulated too. Run it through `gpu_check.sh`.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from trl_fp8 import _upstream
from trl_fp8.float8 import RECIPES, blockwise, layer_factory
from trl_fp8.float8.device import resolve_emulation


# (out_features, in_features) of the linears of a Qwen3-8B layer
QWEN3_8B = {
    "q/o_proj": (4096, 4096),
    "k/v_proj": (1024, 4096),
    "gate/up_proj": (12288, 4096),
    "down_proj": (4096, 12288),
}
DRY_SHAPES = {"square": (64, 64), "wide": (48, 80)}
# Real kernels accumulate in another order and round to BF16; two correct results differ by about 50 dB
LEAST_SQNR = 40.0


def sqnr(reference: Tensor, value: Tensor) -> float:
    noise = (reference.double() - value.double()).norm()
    return math.inf if noise == 0 else (20 * torch.log10(reference.double().norm() / noise)).item()


def passes(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, grad_x and grad_W of one forward and backward under BF16 autocast."""
    x = x.detach().requires_grad_()
    layer.weight.grad = None
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        output = layer(x)
    output.backward(gradient)
    return output.detach(), x.grad, layer.weight.grad


def seconds(run: Callable[[], object], repeat: int) -> float:
    """Median seconds of `run`."""
    times = []
    for _ in range(repeat + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeat // 2]


def check_layer(
    recipe: str, rounding: str, shape: tuple[int, int], tokens: int, device: torch.device, repeat: int
) -> dict:
    """One row of the table."""
    torch.manual_seed(0)
    rows, columns = shape
    linear = nn.Linear(columns, rows, bias=False, device=device)
    x = torch.randn(tokens, columns, device=device)
    gradient = torch.randn(tokens, rows, device=device).to(torch.bfloat16)
    real = layer_factory(recipe, rounding, resolve_emulation(recipe, None, device))(copy.deepcopy(linear))
    emulated = layer_factory(recipe, rounding, True)(copy.deepcopy(linear))
    agreement = [
        sqnr(ours, theirs)
        for ours, theirs in zip(passes(emulated, x, gradient), passes(real, x, gradient), strict=True)
    ]
    base = seconds(lambda: passes(linear, x, gradient), repeat)
    return {
        "recipe": recipe,
        "scale_rounding": rounding,
        "sqnr": [round(value, 1) for value in agreement],
        "speedup_eager": round(base / seconds(lambda: passes(real, x, gradient), repeat), 3),
        "ok": min(agreement) > LEAST_SQNR,
    }


def torchao_operands(recipe: str, rounding: str, device: torch.device) -> list[Tensor]:
    """FP8 values and scales of every operand torchao hands to a matmul in one forward and backward of a layer."""
    torch.manual_seed(0)
    linear, x = nn.Linear(512, 256, bias=False), torch.randn(64, 512)
    x[3] = 0
    gradient = torch.randn(64, 256).to(torch.bfloat16)
    layer = layer_factory(recipe, rounding, resolve_emulation(recipe, None, device))(linear.to(device))
    seen: list[Tensor] = []
    table, matmul = _upstream.FLOAT8_OPS_TABLE, torch.ops.aten.mm.default
    original = table[matmul]

    def spy(op, args, kwargs=None):
        seen.extend(part for operand in args for part in (operand._data.float().cpu(), operand._scale.cpu()))
        return original(op, args, kwargs)

    table[matmul] = spy
    try:
        passes(layer, x.to(device), gradient.to(device))
    finally:
        table[matmul] = original
    return seen


def check_torchao_scales(device: torch.device, recipes: list[str]) -> dict[str, bool]:
    """Scales and FP8 values that reach the kernels equal those of the emulation on the CPU bit for bit."""
    result = {}
    for recipe in recipes:
        for rounding in ("none", "power_of_2"):
            here, there = (torchao_operands(recipe, rounding, d) for d in (device, torch.device("cpu")))
            equal = [torch.equal(a, b) for a, b in zip(here, there, strict=True)]
            result[f"{recipe}, {rounding}"] = len(equal) >= 8 and all(equal)
    return result


def check_blockwise_scales(device: torch.device) -> bool:
    """Scales of torchao's kernels equal ours bit for bit."""
    kernels = _upstream.blockwise_kernels()
    torch.manual_seed(0)
    x = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
    x[3] = 0
    groups, blocks = blockwise.quantize_groups(x), blockwise.quantize_blocks(x)
    by_group = kernels.triton_fp8_blockwise_act_quant_lhs(x, 128)
    by_block = kernels.triton_fp8_blockwise_weight_quant_rhs(x, block_size=128)
    return (
        torch.equal(by_group[1], groups[1].squeeze(-1))
        and torch.equal(by_group[0].float(), groups[0].reshape(256, 512).float())
        and torch.equal(by_block[1], blocks[1].reshape(2, 4))
        and torch.equal(by_block[0].float(), blocks[0].reshape(256, 512).float())
    )


def check_scales_across_devices(device: torch.device) -> bool:
    """The scales and FP8 values of our emulation are the same on this device and on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    here, there = blockwise.quantize_groups(x), blockwise.quantize_groups(x.to(device))
    return all(torch.equal(a.float(), b.float().cpu()) for a, b in zip(here, there, strict=True))


def check_training(recipe: str, device: torch.device, steps: int) -> dict:
    """A few GRPO steps of a small model with calibration at every batch, real kernels where there are any."""
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

    words = ["<pad>", "<eos>", "<unk>", *"0123456789+="]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = FP8GRPOConfig(
            folder,
            fp8_recipe=recipe,
            use_cpu=device.type == "cpu",
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            calibration_interval=1,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = FP8GRPOTrainer(
            Qwen3ForCausalLM(config),
            lambda completions, **kwargs: [float(len(text) % 3) for text in completions],
            args,
            train_dataset=Dataset.from_dict({"prompt": [f"{i // 10}+{i % 10}=" for i in range(64)]}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                pad_token="<pad>",
                eos_token="<eos>",
                unk_token="<unk>",
                padding_side="left",
            ),
        )
        start = time.perf_counter()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "recipe": recipe,
        "emulated": trainer.conversion_report.emulated,
        "bounds": [round(bound, 4) for bound in trainer.clip_bounds],
        "seconds": round(time.perf_counter() - start, 1),
        "ok": len(losses) == steps and all(math.isfinite(loss) for loss in losses),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small shapes")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "No CUDA GPU is visible, so there are no kernels to check. Use --dry-run to go through the steps on a CPU."
        )
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    shapes, tokens = (DRY_SHAPES, 32) if options.dry_run else (QWEN3_8B, options.tokens)
    report: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu (dry run)" if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": [],
        "training": [],
    }
    layers = [(recipe, "none") for recipe in options.recipes]
    layers += [(recipe, "power_of_2") for recipe in options.recipes if recipe in ("rowwise", "blockwise")]
    print(f"{report['device']}, torch {report['torch']}, {tokens} tokens")
    print("| layer | recipe | output dB | grad_x dB | grad_W dB | speed-up over BF16, eager | |\n|" + "---|" * 7)
    for name, shape in shapes.items():
        for recipe, rounding in layers:
            measured = check_layer(recipe, rounding, shape, tokens, device, 1 if options.dry_run else options.repeat)
            row = {"layer": name, **measured}
            report["layers"].append(row)
            decibels = " | ".join(str(value) for value in row["sqnr"])
            label = recipe if rounding == "none" else f"{recipe}, {rounding}"
            print(f"| {name} | {label} | {decibels} | {row['speedup_eager']} | {'ok' if row['ok'] else 'FAILED'} |")
    report["scales_across_devices"] = check_scales_across_devices(device)
    torchao_recipes = [recipe for recipe in options.recipes if recipe != "blockwise"]
    report["torchao_scales"] = check_torchao_scales(device, torchao_recipes)
    report["blockwise_scales"] = None if options.dry_run else check_blockwise_scales(device)
    print(f"blockwise scales and values equal on CPU and {device.type}: {report['scales_across_devices']}")
    print(f"torchao's scales and values equal on CPU and {device.type}: {report['torchao_scales']}")
    print(f"blockwise scales and values equal to torchao's kernels: {report['blockwise_scales']}")
    for recipe in options.recipes:
        report["training"].append(check_training(recipe, device, steps=4 if options.dry_run else 8))
        print(f"training: {report['training'][-1]}")
    checks = [row["ok"] for row in report["layers"] + report["training"]]
    checks += [report["scales_across_devices"], report["blockwise_scales"] is not False]
    checks += report["torchao_scales"].values()
    report["ok"] = all(checks)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
