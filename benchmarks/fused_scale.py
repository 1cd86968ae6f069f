"""Whether `tensorwise` gets nearer to vLLM's `fp8_per_tensor` with one weight scale for q, k, v and for gate, up.

    make venv-vllm
    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/fused_scale.py --batches 10 [--shared] [--per_token]

Takes the options of `mismatch.py` besides:

    --shared      each of the linears that vLLM fuses is cast with the largest |w| of all of them, as the engine does
    --per_token   the engine scales activations per token, as it does on GPUs with CUTLASS; on CPUs it scales them over
                  all tokens of a step
"""

import sys

import mismatch
import torch
from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale

from trl_fp8 import trainer
from trl_fp8._upstream import matmul_with_hp_or_float8_args
from trl_fp8.float8.linear import SwitchableFloat8Linear
from trl_fp8.rollout.layer_table import FUSED


def shared_matmul(self, rows, weight):
    with torch.no_grad():
        amax = torch.stack([linear().weight.abs().max().to(weight.dtype) for linear in self.group]).max()
        scale = amax_to_scale(amax, torch.float8_e4m3fn)
    cast = hp_tensor_and_scale_to_float8(
        weight.t(), scale, torch.float8_e4m3fn, self.linear_mm_config, GemmInputRole.WEIGHT
    )
    return matmul_with_hp_or_float8_args.apply(rows, cast, self.linear_mm_config, self.config)


def share_scales(convert_model):
    """`convert_model`, after which fused linears know each other (through functions, since modules own modules)."""

    def convert(model, *args, **kwargs):
        report = convert_model(model, *args, **kwargs)
        for module in model.modules():
            for parts in FUSED.values():
                linears = [getattr(module, part, None) for part in parts]
                if all(isinstance(linear, SwitchableFloat8Linear) for linear in linears):
                    for linear in linears:
                        linear.group = [lambda linear=linear: linear for linear in linears]
        for module in model.modules():
            if isinstance(module, SwitchableFloat8Linear) and not hasattr(module, "group"):
                module.group = [lambda module=module: module]
        return report

    return convert


def taken(flag: str) -> bool:
    found = flag in sys.argv
    if found:
        sys.argv.remove(flag)
    return found


if __name__ == "__main__":
    if taken("--shared"):
        SwitchableFloat8Linear.quantized_matmul = shared_matmul
        trainer.convert_model = share_scales(trainer.convert_model)
    if taken("--per_token"):
        import vllm.model_executor.layers.quantization.online.fp8 as online

        online.cutlass_fp8_supported = lambda: True
    if "--pairs" not in sys.argv:
        sys.argv += ["--pairs", str(mismatch.PAIRS.index(("tensorwise", "none", "fp8_per_tensor")))]
    mismatch.main()
