"""`FP8GRPOConfig`: every setting of the FP8 trainer, checked when it is built."""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trl import GRPOConfig

from .clipping import ClipSearch


# Names of vLLM 0.26 to 0.31 for quantising an unquantised checkpoint at load time
VLLM_QUANTIZATIONS = (
    "auto",
    "none",
    "fp8",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "mxfp8",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
    "torchao",
    "compressed-tensors",
)
# Losses in which L bounds A < 0 tokens and H bounds A > 0 tokens
CALIBRATED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Fields whose Python None (YAML null) means the word "none"
_NONE_FIELDS = ("fp8_recipe", "fp8_scale_rounding", "vllm_quantization")


@dataclass
class FP8GRPOConfig(GRPOConfig):
    r"""
    Configuration of [`FP8GRPOTrainer`], on top of [`~trl.GRPOConfig`].

    Off is the word `"none"` where a field has one; Python `None` and YAML null mean the same there. Sources: "paper"
    is arXiv 2609.22870; "chosen by us" is explained in `docs/method.md`.

    > Parameters that control FP8 training

    Args:
        fp8_recipe (`str`, defaults to `"rowwise"`):
            Scaling of the FP8 matmuls in training: `"tensorwise"`, `"rowwise"`, `"rowwise_with_gw_hp"` (TorchAO's
            recipes), `"blockwise"` (not built yet), or `"none"` for training in the run's own precision.
        fp8_scale_rounding (`str`, defaults to `"none"`):
            Rounding of rowwise scales: `"none"` (as vLLM's per-channel FP8 does) or `"power_of_2"` (as TorchAO's own
            rowwise recipe does). Chosen by us: a mixed pair mismatches more than BF16 training.
        fp8_emulate (`bool`, *optional*):
            `None` uses FP8 kernels on GPUs that have them and emulates elsewhere; `True`/`False` force.
        fp8_exclude_modules (`list[str]`, *optional*):
            Patterns of linear layers to keep in high precision, matched with `fnmatch` against the full name or a
            dotted suffix of it. A pattern that matches nothing is an error.
        fp8_compile (`bool`, defaults to `False`):
            Compile each decoder layer. Not built yet.
        fp8_fsdp_all_gather (`bool`, defaults to `False`):
            Gather weights in FP8 under FSDP2, tensorwise only. Not built yet.

    > Parameters that control Calibrated Clipping

        use_calibrated_clipping (`bool`, defaults to `True`):
            Whether to move the clip bounds to what BF16 would clip. Off: fixed bounds from `epsilon`, `epsilon_high`.
        calibration_interval (`int`, defaults to `20`):
            Generation batches between two recalibrations (the paper's "training steps").
        clip_lower_init (`float`, defaults to `0.6`):
            Lower bound on the ratio before the first recalibration (paper).
        clip_upper_init (`float`, defaults to `1.8`):
            Upper bound on the ratio before the first recalibration (paper).
        clip_lower_min (`float`, defaults to `0.5`), clip_lower_max (`float`, defaults to `0.9`):
            Search interval of the lower bound (paper).
        clip_upper_min (`float`, defaults to `1.2`), clip_upper_max (`float`, defaults to `2.0`):
            Search interval of the upper bound (paper).
        clip_grid_step (`float`, defaults to `0.02`):
            Distance of neighbouring candidates (paper).
        clip_lower_max_change (`float`, defaults to `0.05`), clip_upper_max_change (`float`, defaults to `0.1`):
            SmoothUpdate limits per recalibration (paper).
        rebalance_with (`str`, defaults to `"smoothed"`):
            Lower bound that stage 2 balances against: the `"smoothed"` one or the raw `"target"` (chosen by us).

    > Parameters that control the rollout in vLLM

        vllm_quantization (`str`, defaults to `"auto"`):
            Quantisation of the rollout engine: `"auto"` for the pair of `fp8_recipe`, `"none"`, or a name of vLLM's.
        vllm_kv_cache_dtype (`str`, *optional*):
            Data type of the engine's KV cache, e.g. `"fp8"`.
        vllm_engine_kwargs (`dict`, *optional*):
            Further keyword arguments of the engine.

    > [!NOTE]
    > Changed defaults of TRL's fields: `vllm_importance_sampling_mode` `"token_truncate"` and
    > `vllm_importance_sampling_clip_max` `2.0` (TIS, paper), `epsilon_high` `0.24` (paper). `epsilon` and
    > `epsilon_high` are the reference trust region, the one a BF16 run would use. With calibration on and neither
    > `steps_per_generation` nor `generation_batch_size` set, `steps_per_generation` is
    > `4 * gradient_accumulation_steps` (the paper's four mini-batches), since with TRL's default every ratio is 1.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    # Parameters that control FP8 training
    fp8_recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"] = field(
        default="rowwise",
        metadata={
            "help": "Scaling of the FP8 matmuls in training: TorchAO's 'tensorwise', 'rowwise' or "
            "'rowwise_with_gw_hp', 'blockwise' (not built yet), or 'none' to train in the run's own precision."
        },
    )
    fp8_scale_rounding: Literal["none", "power_of_2"] = field(
        default="none",
        metadata={
            "help": "Rounding of rowwise scales: 'none' (as vLLM's per-channel FP8) or 'power_of_2' (as TorchAO's own "
            "rowwise recipe). A mixed pair of trainer and engine mismatches more than BF16 training does."
        },
    )
    fp8_emulate: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to emulate FP8 matmuls. If unset, real kernels run on GPUs that have them, emulation "
            "elsewhere."
        },
    )
    fp8_exclude_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Patterns of linear layers to keep in high precision, matched with fnmatch against the full name "
            "or a dotted suffix of it ('lm_head' matches 'model.lm_head'). A pattern that matches nothing is an error."
        },
    )
    fp8_compile: bool = field(default=False, metadata={"help": "Compile each decoder layer. Not built yet."})
    fp8_fsdp_all_gather: bool = field(
        default=False, metadata={"help": "Gather weights in FP8 under FSDP2 (tensorwise only). Not built yet."}
    )

    # Parameters that control Calibrated Clipping
    use_calibrated_clipping: bool = field(
        default=True,
        metadata={
            "help": "Move the clip bounds so that FP8 clips what BF16 would clip. Off: fixed bounds from `epsilon` "
            "and `epsilon_high`."
        },
    )
    calibration_interval: int = field(
        default=20,
        metadata={"help": "Generation batches between two recalibrations (the paper's training steps)."},
    )
    clip_lower_init: float = field(
        default=0.6, metadata={"help": "Lower bound on the importance ratio before the first recalibration."}
    )
    clip_upper_init: float = field(
        default=1.8, metadata={"help": "Upper bound on the importance ratio before the first recalibration."}
    )
    clip_lower_min: float = field(default=0.5, metadata={"help": "Smallest lower bound that is searched."})
    clip_lower_max: float = field(default=0.9, metadata={"help": "Largest lower bound that is searched."})
    clip_upper_min: float = field(default=1.2, metadata={"help": "Smallest upper bound that is searched."})
    clip_upper_max: float = field(default=2.0, metadata={"help": "Largest upper bound that is searched."})
    clip_grid_step: float = field(default=0.02, metadata={"help": "Distance of neighbouring candidate bounds."})
    clip_lower_max_change: float = field(
        default=0.05, metadata={"help": "Largest move of the lower bound per recalibration."}
    )
    clip_upper_max_change: float = field(
        default=0.1, metadata={"help": "Largest move of the upper bound per recalibration."}
    )
    rebalance_with: Literal["smoothed", "target"] = field(
        default="smoothed",
        metadata={
            "help": "Lower bound that the upper bound is balanced against: the 'smoothed' one that training will use, "
            "or the raw 'target'."
        },
    )

    # Parameters that control the rollout in vLLM
    vllm_quantization: str = field(
        default="auto",
        metadata={
            "help": "Quantisation of the rollout engine: 'auto' (the pair of `fp8_recipe`), 'none', or a name of "
            "vLLM's such as 'fp8_per_channel'."
        },
    )
    vllm_kv_cache_dtype: str | None = field(
        default=None, metadata={"help": "Data type of the engine's KV cache, e.g. 'fp8'."}
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Further keyword arguments of the vLLM engine."}
    )

    # TRL's fields with this project's defaults
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "How importance sampling corrects for the difference of rollout and trainer: 'token_truncate' "
            "(TIS), 'token_mask', 'sequence_truncate' or 'sequence_mask'."
        },
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=2.0, metadata={"help": "Upper bound C of the importance sampling weight (TIS: 2)."}
    )
    epsilon_high: float | None = field(
        default=0.24,
        metadata={
            "help": "Upper epsilon of the reference trust region, the one a BF16 run would use. If None, `epsilon`."
        },
    )

    def __post_init__(self):
        self._check_values()
        # TRL turns "auto" into a number; whether FP8 kernels need one is known only with the device
        self._pad_to_multiple_of_is_auto = self.pad_to_multiple_of == "auto"
        self._default_steps_per_generation = (
            self.use_calibrated_clipping and self.steps_per_generation is None and self.generation_batch_size is None
        )
        if self._default_steps_per_generation:
            self.steps_per_generation = 4 * self.gradient_accumulation_steps
        self._check_accelerate_fp8()
        super().__post_init__()
        self._check_rollout()
        if self.use_calibrated_clipping:
            self._check_calibration()

    @property
    def reference_bounds(self) -> tuple[float, float]:
        """`(1 - epsilon, 1 + epsilon_high)`: the trust region one would use in BF16."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def clip_search(self) -> ClipSearch:
        """The search record of the `clip_*` fields."""
        return ClipSearch(**{f.name: getattr(self, f.name) for f in fields(ClipSearch)})

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches (forward and backward passes per rank) that train on one generation batch."""
        assert self.steps_per_generation is not None  # set by GRPOConfig.__post_init__
        return self.steps_per_generation * self.num_iterations

    @property
    def ratios_are_one(self) -> bool:
        """Whether each generation batch gets one update, so that every ratio is 1 (TRL's own condition)."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation == 0

    def _check_values(self) -> None:
        """Values the parser lets through: Literal fields and numbers are not checked for Python callers or YAML."""
        for name in _NONE_FIELDS:
            value = getattr(self, name)
            if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
                setattr(self, name, "none")
        if self.vllm_kv_cache_dtype is not None and str(self.vllm_kv_cache_dtype).lower() in ("none", "null"):
            self.vllm_kv_cache_dtype = None
        if isinstance(self.fp8_exclude_modules, str):
            self.fp8_exclude_modules = [self.fp8_exclude_modules]
        own = [f.name for f in fields(FP8GRPOConfig) if f.name in FP8GRPOConfig.__annotations__]
        hints = get_type_hints(FP8GRPOConfig)
        for name in own:
            setattr(self, name, _checked(name, getattr(self, name), hints[name]))
        if self.vllm_quantization not in VLLM_QUANTIZATIONS:
            raise ValueError(_unknown("vllm_quantization", self.vllm_quantization, VLLM_QUANTIZATIONS))
        if self.vllm_importance_sampling_mode not in IMPORTANCE_SAMPLING_MODES:
            raise ValueError(
                _unknown(
                    "vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, IMPORTANCE_SAMPLING_MODES
                )
            )
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} is no trust region: it clips every ratio or none. Set a number > 0.")
        if self.epsilon >= 1 and self.use_calibrated_clipping:
            raise ValueError(
                f"epsilon={self.epsilon} puts the lower reference bound at {1 - self.epsilon}, where no ratio is ever "
                "clipped and nothing can be calibrated. Set 0 < epsilon < 1, or use_calibrated_clipping=False."
            )
        if self.calibration_interval < 1:
            raise ValueError(
                f"calibration_interval={self.calibration_interval} never comes round. Set a number of generation "
                "batches >= 1, or use_calibrated_clipping=False to keep the bounds fixed."
            )
        self.clip_search.check_start(self.clip_lower_init, self.clip_upper_init)
        for name, flag, issue in (
            ("fp8_recipe", self.fp8_recipe == "blockwise", "Use 'rowwise', its nearest relative"),
            ("fp8_compile", self.fp8_compile, "Leave it False"),
            ("fp8_fsdp_all_gather", self.fp8_fsdp_all_gather, "Leave it False"),
        ):
            if flag:
                raise ValueError(f"{name}={getattr(self, name)!r} is not built yet in this version. {issue}.")

    def _check_accelerate_fp8(self) -> None:
        # TRL's bf16=True beats this variable without a word, so the accelerator never shows what was asked for
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8":
            raise ValueError(
                "accelerate's mixed_precision='fp8' (ACCELERATE_MIXED_PRECISION) would be overridden by TRL's "
                "bf16=True, or convert the model a second time. Launch with mixed_precision 'bf16' or 'no' and choose "
                f"the FP8 recipe here (fp8_recipe={self.fp8_recipe!r})."
            )

    def _check_rollout(self) -> None:
        fp8 = self.fp8_recipe != "none"
        if not self.use_vllm:
            for name, value, off in (
                ("vllm_quantization", self.vllm_quantization, ("auto", "none")),
                ("vllm_kv_cache_dtype", self.vllm_kv_cache_dtype, (None,)),
                ("vllm_engine_kwargs", self.vllm_engine_kwargs, (None,)),
            ):
                if value not in off:
                    raise ValueError(
                        f"{name}={value!r} asks for something of the vLLM engine, but use_vllm=False starts none. Set "
                        f"use_vllm=True, or leave {name} unset."
                    )
        elif self.vllm_quantization != "none" and (fp8 or self.vllm_quantization != "auto"):
            raise ValueError(
                f"vllm_quantization={self.vllm_quantization!r} with use_vllm=True is not built yet in this version: "
                "TRL's weight sync cannot re-quantise. Set vllm_quantization='none' for a BF16 rollout, or use_vllm="
                "False to generate with the FP8 forward."
            )
        elif self.vllm_kv_cache_dtype is not None or self.vllm_engine_kwargs is not None:
            raise ValueError(
                f"vllm_kv_cache_dtype={self.vllm_kv_cache_dtype!r} and vllm_engine_kwargs={self.vllm_engine_kwargs!r} "
                "are not built yet in this version. Leave them unset."
            )
        truncated = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        if self.use_vllm and self.vllm_importance_sampling_correction and any(truncated.values()):
            names = [name for name, on in truncated.items() if on]
            raise ValueError(
                f"{', '.join(f'{n}={getattr(self, n)}' for n in names)} truncates sampling, which multiplies every "
                "importance weight by the kept mass (huggingface/trl#6789). Set top_p=1.0, top_k=0, min_p=None, or "
                "vllm_importance_sampling_correction=False."
            )
        if fp8 or self.use_calibrated_clipping:
            self._check_stock_features()

    def _check_stock_features(self) -> None:
        if self.use_liger_kernel:
            raise ValueError(
                "use_liger_kernel=True replaces forwards that call the linear layers, so neither FP8 nor the BF16 "
                "reference could be vouched for. Set use_liger_kernel=False."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching=True casts the FP32 master weights to BF16 in place (TRL 1.16), "
                "which loses small updates. Set it to False, or use vLLM."
            )

    def _check_calibration(self) -> None:
        if self.loss_type not in CALIBRATED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} does not read both clip bounds, so calibrating them changes nothing. "
                f"Use one of {', '.join(CALIBRATED_LOSS_TYPES)}, or use_calibrated_clipping=False."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} clips one ratio per sequence, and "
                "calibration is built for token ratios. Use 'token', or use_calibrated_clipping=False."
            )
        if self.delta is not None and self.delta <= self.clip_upper_max:
            raise ValueError(
                f"delta={self.delta} lies inside the search interval of the upper bound (clip_upper_max="
                f"{self.clip_upper_max}), so the bounds would cross. Set delta above clip_upper_max, or lower "
                "clip_upper_max."
            )


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` of field `name` if it fits the type hint (an int is a float); `ValueError` otherwise."""
    options = get_args(hint) if type(hint).__name__ in ("UnionType", "Union") else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
            raise ValueError(_unknown(name, value, get_args(option)))
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
            raise ValueError(f"{name}={value} is not finite, so nothing can be compared with it. Set a finite number.")
        plain = get_origin(option) or option
        if isinstance(value, plain) and not (isinstance(value, bool) and plain is not bool):
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                break
            return value
    expected = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{name}={value!r} has the wrong type ({type(value).__name__}). Pass {expected}.")


def _unknown(name: str, value: Any, known: tuple) -> str:
    return f"{name}={value!r} is not one of the values it can take. Use one of: {', '.join(map(str, known))}."
