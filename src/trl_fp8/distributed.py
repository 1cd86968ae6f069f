"""Which ways of spreading a run over processes FP8 layers work with, and which are refused: docs/distributed.md."""

import os
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from .config import FP8GRPOConfig
from .float8.recipes import RECIPES


@dataclass(frozen=True)
class World:
    """How accelerate spreads the model."""

    fsdp_version: int = 0  # 1 or 2, 0 without FSDP
    fsdp_checkpointing: bool = False  # whether FSDP checkpoints activations itself
    zero_stage: int = 0  # of DeepSpeed, 0 without
    model_parallel: tuple[str, ...] = ()  # names and sizes of parallelism inside a layer or a sequence
    kind: str = "NO"  # accelerate's name
    num_processes: int = 1
    num_shards: int = 1  # a weight is cut into, where FSDP cuts it
    cpu_offload: bool = False  # whether FSDP2 keeps weights in host memory
    loads_after_sharding: bool = False  # whether FSDP2 replaces each sharded weight by one that rank 0 loaded

    def __str__(self) -> str:
        if self.num_processes == 1:
            return ""
        zero = f"ZeRO-{self.zero_stage}" if self.zero_stage else "DDP"
        return f"{self.num_processes} processes ({f'FSDP{self.fsdp_version}' if self.fsdp_version else zero})"

    @classmethod
    def of(cls, accelerator: Any) -> "World":
        """Read from accelerate's state."""
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        deepspeed = accelerator.state.deepspeed_plugin
        sizes = accelerator.parallelism_config
        inside = ("tp_size", "cp_size", "sp_size")
        shards = getattr(sizes, "dp_shard_size", 1)
        return cls(
            fsdp_version=0 if fsdp is None else fsdp.fsdp_version,
            fsdp_checkpointing=fsdp is not None and bool(fsdp.activation_checkpointing),
            zero_stage=0 if deepspeed is None else deepspeed.zero_stage,
            model_parallel=tuple(f"{name}={size}" for name in inside if (size := getattr(sizes, name, 1)) > 1),
            kind=accelerator.distributed_type.value,
            num_processes=accelerator.num_processes,
            num_shards=shards if shards > 1 else accelerator.num_processes,
            cpu_offload=isinstance(getattr(fsdp, "cpu_offload", None), CPUOffloadPolicy),
            loads_after_sharding=bool(getattr(fsdp, "cpu_ram_efficient_loading", False)),
        )


def check_strategy(args: FP8GRPOConfig, world: World) -> None:
    """Refuse what cannot work, or what nobody has shown to.

    Raises:
        ValueError: naming the setting, the reason and what to do.
    """
    _check_compile(args, world)
    _check_all_gather(args, world)
    if args.fp8_recipe == "none":
        return
    _check_launched(world)
    if world.fsdp_version == 1:
        raise ValueError(
            f"fsdp_version=1 with fp8_recipe={args.fp8_recipe!r}: FSDP1 puts the weights of a layer into one flat "
            "parameter, which torchao's FP8 training does not support. Set fsdp_version: 2 in the accelerate config "
            "(configs/accelerate/fsdp2.yaml)."
        )
    if world.model_parallel:
        raise ValueError(
            f"{', '.join(world.model_parallel)} in accelerate's parallelism_config splits layers or sequences, and "
            f"the scales of fp8_recipe={args.fp8_recipe!r} would be those of a part. Use data parallelism (DDP, "
            "FSDP2, ZeRO), or fp8_recipe='none'."
        )


def _check_launched(world: World) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and world.fsdp_version == 0:
        raise ValueError(
            f"The launcher asks for FSDP (ACCELERATE_USE_FSDP=true), and accelerate starts {world.kind} without it: "
            "it has none on a CPU, and every process would hold the whole model. Launch with "
            "configs/accelerate/ddp.yaml (cpu_2proc_ddp.yaml on a CPU), or on GPUs."
        )


def _check_compile(args: FP8GRPOConfig, world: World) -> None:
    if not args.fp8_compile:
        return
    if args.fp8_recipe == "none":
        raise ValueError(
            "fp8_compile=True with fp8_recipe='none' has no FP8 layer to speed up. Use transformers' torch_compile, "
            "or set fp8_compile=False."
        )
    if args.torch_compile:
        raise ValueError(
            "fp8_compile=True with torch_compile=True would compile each layer inside a compiled one. Set one of them."
        )
    recomputes = args.gradient_checkpointing or world.fsdp_checkpointing
    if recomputes and not RECIPES[args.fp8_recipe].recomputes_compiled:
        raise ValueError(
            f"fp8_compile=True with gradient_checkpointing={args.gradient_checkpointing} (FSDP's own: "
            f"{world.fsdp_checkpointing}) and fp8_recipe={args.fp8_recipe!r}: recomputed casts are fused otherwise "
            "than the first ones, which has given NaN on GPUs (pytorch/torchtitan#1056), and this project has no GPU "
            "result that says otherwise. Set gradient_checkpointing=False, fp8_compile=False, or "
            "fp8_recipe='tensorwise'."
        )
    if world.zero_stage == 3:
        raise ValueError(
            "fp8_compile=True with DeepSpeed ZeRO-3, whose hooks gather each linear's weight inside the layer and "
            "break its graph there. Use FSDP2 (configs/accelerate/fsdp2.yaml) or ZeRO-2, or set fp8_compile=False."
        )


def _check_all_gather(args: FP8GRPOConfig, world: World) -> None:
    if not args.fp8_fsdp_all_gather:
        return
    if world.fsdp_version != 2:
        strategy = {1: "FSDP1", 0: f"ZeRO-{world.zero_stage}" if world.zero_stage else "no FSDP"}[world.fsdp_version]
        raise ValueError(
            f"fp8_fsdp_all_gather=True with {strategy}, where nothing asks a weight how it is to be gathered. Launch "
            "with FSDP2 (configs/accelerate/fsdp2.yaml), or set fp8_fsdp_all_gather=False."
        )
    if world.cpu_offload:
        raise ValueError(
            "fp8_fsdp_all_gather=True with FSDP's offload_params: shards that are brought to the device for a gather "
            "are copies, of which nobody has shown that their scales are kept. Set fsdp_offload_params: false in the "
            "accelerate config, or fp8_fsdp_all_gather=False."
        )
    if world.loads_after_sharding:
        raise ValueError(
            "fp8_fsdp_all_gather=True with FSDP's cpu_ram_efficient_loading, which puts ordinary weights in the place "
            "of those that are gathered in FP8. Set fsdp_cpu_ram_efficient_loading: false in the accelerate config, "
            "or fp8_fsdp_all_gather=False."
        )
