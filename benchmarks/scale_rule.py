"""Why power-of-two scales are noisier on a real model: the largest value of a row, exact or not.

    .venv/bin/python examples/prepare_smollm2.py --output /tmp/smollm2
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scale_rule.py --model /tmp/smollm2

FP8 is a floating format, so a scale moves the rounding of a value hardly at all, with one exception: an FP32 scale
maps the largest value of a row to 448, which FP8 holds exactly, and a power of two maps it anywhere in (224, 448],
where it rounds like any other (by up to 1/16 of itself). In models with massive activations that one value carries the
row.
The same completions are scored with every linear quantised by row in one of these ways:

    fp32            scale 448 / max
    power of 2      that, rounded down to a power of two (torchao's own rule)
    ... exact max   the same, with the largest value of each row put back: is it that value alone?
    431 / max       an FP32 scale that maps the largest value half-way between two FP8 numbers
"""

import argparse

import torch
from common import versions
from ratio_noise import sample
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fp8.float8.emulation import decode


RULES = ["fp32", "power of 2", "power of 2, exact max", "431 / max"]


def quantized(x: Tensor, rule: str) -> Tensor:
    """`x` `(..., K)` as FP8 with one scale per row sees it."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    scale = (431 if rule == "431 / max" else 448) / largest
    if rule.startswith("power of 2"):
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    values = decode((x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)) / scale
    return torch.where(x.abs() == largest, x, values) if rule.endswith("exact max") else values


class Rowwise(nn.Module):
    """A linear layer whose activations and weight are quantised by one rule each."""

    def __init__(self, linear: nn.Linear, activations: str, weights: str):
        super().__init__()
        self.weight, self.rule = quantized(linear.weight.detach(), weights), activations

    def forward(self, x: Tensor) -> Tensor:
        return quantized(x, self.rule) @ self.weight.t()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder written by examples/prepare_smollm2.py")
    parser.add_argument("--num_prompts", type=int, default=4)
    parser.add_argument("--num_generations", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    samples = sample(options.model, options.num_prompts, options.num_generations, options.length, options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]

    def log_probs() -> Tensor:
        found = []
        for prompt, completions in samples.items():
            start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([start + completion for completion in completions])
            logits = model(ids).logits[:, len(start) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(-1, ids[:, len(start) :, None]).flatten())
        return torch.cat(found)

    reference = log_probs()
    print(f"{reference.numel()} tokens")
    print("| activations | weights | prob NMAE | mean abs. log-prob error |\n|" + "---|" * 4)
    for activations, weights in [(rule, rule) for rule in RULES] + [(rule, "fp32") for rule in RULES[1:]]:
        for name, linear in linears:
            model.set_submodule(name, Rowwise(linear, activations, weights))
        scored = log_probs()
        nmae = ((scored.exp() - reference.exp()).abs().sum() / reference.exp().sum()).item()
        error = (scored - reference).abs().mean().item()
        print(f"| {activations} | {weights} | {nmae:.2%} | {error:.4f} |", flush=True)
    print(versions())


if __name__ == "__main__":
    main()
