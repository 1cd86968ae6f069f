"""`FP8GRPOConfig`: every setting of the FP8 trainer, checked when it is built."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trl import GRPOConfig

from . import clip_checks, config_checks
from .clipping.search import ClipSearch
from .float8.recipes import RECIPES


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
            recipes), `"blockwise"` (1x128 and 128x128 groups), or `"none"` for the run's own precision.
        fp8_scale_rounding (`str`, defaults to `"none"`):
            Rounding of rowwise and blockwise scales: `"none"` (as vLLM's per-channel FP8 does) or `"power_of_2"` (as
            TorchAO's own rowwise recipe does). Chosen by us: a mixed pair mismatches more than BF16 training.
        fp8_emulate (`bool`, *optional*):
            `None` uses FP8 kernels on GPUs that have them and emulates elsewhere; `True`/`False` force.
        fp8_exclude_modules (`list[str]`, *optional*):
            Patterns of linear layers to keep in high precision, matched with `fnmatch` against the full name or a
            dotted suffix of it. A pattern that matches nothing is an error.
        fp8_compile (`bool`, defaults to `False`):
            Compile each decoder layer, what makes FP8 faster than BF16 on a GPU. Shadow passes and generation run
            eagerly.
        fp8_fsdp_all_gather (`bool`, defaults to `False`):
            Gather weights in FP8 under FSDP2, half the bytes; `fp8_recipe="tensorwise"` only. Shadow passes gather the
            BF16 weights as well, one layer at a time.
        ref_model_precision (`str`, defaults to `"own"`):
            Precision of the reference model where `beta` > 0: its `"own"` (the policy without its adapter then runs in
            the run's own precision too), or the policy's `"fp8"`. Chosen by us.

    > Parameters that control the clip

        clip_policy (`str`, defaults to `"auto"`):
            Which policy moves the clip bounds or weighs the tokens: `"calibrated"` (what BF16 would clip), `"fixed"`
            (TRL's bounds from `epsilon` and `epsilon_high`: vanilla FP8), or the dotted path of a `ClippingPolicy`.
            `"auto"` is `"calibrated"` where the loss has two bounds to calibrate, else `"fixed"`. A policy passed in
            `callbacks` takes its place.
        clip_policy_kwargs (`dict`, *optional*):
            Arguments of the policy that `clip_policy` names.
        shadow_interval (`int`, *optional*):
            Score every n-th generation batch in BF16 and log over-clipping and noise, whatever the policy. `None`:
            only when the policy asks for it.

    > Parameters that control Calibrated Clipping

        calibration_interval (`int`, defaults to `20`):
            Generation batches between two recalibrations (the paper's "training steps").
        clip_lower_init (`float`, defaults to `0.6`), clip_upper_init (`float`, defaults to `1.8`):
            Bounds on the ratio before the first recalibration (paper).
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
            A server (`vllm_mode="server"`) must have been started with it.
        vllm_kv_cache_dtype (`str`, *optional*):
            Data type of the engine's KV cache, e.g. `"fp8"`. A server must have been started with it.
        vllm_engine_kwargs (`dict`, *optional*):
            Further keyword arguments of a colocated engine.
        vllm_sync_check_interval (`int`, defaults to `1`):
            Weight syncs between two comparisons of trainer and engine on a fixed prompt (a forward of 32 tokens on
            each side). 0 turns them off. Chosen by us.
        vllm_sync_check_max_ratio (`float`, defaults to `5.0`):
            Largest difference of log-probs on that prompt, in multiples of the first sync's; beyond it the run stops.
            Chosen by us.

    > [!NOTE]
    > Changed defaults of TRL's fields: `vllm_importance_sampling_mode` `"token_truncate"` and
    > `vllm_importance_sampling_clip_max` `2.0` (TIS, paper), `epsilon_high` `0.24` (paper). `epsilon` and
    > `epsilon_high` are the reference trust region, the one a BF16 run would use. With every `clip_policy` but
    > `"fixed"`, or with `shadow_interval`, and neither `steps_per_generation` nor `generation_batch_size` set,
    > `steps_per_generation` is `4 * gradient_accumulation_steps` (the paper's four mini-batches), since with TRL's
    > default every ratio is 1.
    """

    # Parameters that control FP8 training
    fp8_recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"] = field(
        default="rowwise",
        metadata={
            "help": "Scaling of the FP8 matmuls in training: TorchAO's 'tensorwise', 'rowwise' or "
            "'rowwise_with_gw_hp', 'blockwise' (1x128 and 128x128 groups), or 'none' for the run's own precision."
        },
    )
    fp8_scale_rounding: Literal["none", "power_of_2"] = field(
        default="none",
        metadata={
            "help": "Rounding of rowwise and blockwise scales: 'none' (as vLLM's per-channel FP8) or 'power_of_2' (as "
            "TorchAO's own rowwise recipe). A mixed pair of trainer and engine mismatches more than BF16 training."
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
    fp8_compile: bool = field(default=False, metadata={"help": "Compile each decoder layer, which FP8 needs to pay."})
    fp8_fsdp_all_gather: bool = field(
        default=False,
        metadata={"help": "Gather weights in FP8 under FSDP2, half the bytes ('tensorwise' only)."},
    )
    ref_model_precision: Literal["own", "fp8"] = field(
        default="own",
        metadata={
            "help": "Precision of the reference model where `beta` > 0: its 'own', whose KL at step 0 is what FP8 "
            "changes, or the policy's 'fp8', whose KL starts at 0."
        },
    )

    # Parameters that control the clip
    clip_policy: str = field(
        default="auto",
        metadata={
            "help": "Policy of the clip: 'calibrated' (what BF16 would clip), 'fixed' (TRL's bounds), or the dotted "
            "path of a ClippingPolicy. 'auto': 'calibrated' where the loss has two bounds to calibrate, else 'fixed'."
        },
    )
    clip_policy_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of the policy that `clip_policy` names, as a JSON object."}
    )
    shadow_interval: int | None = field(
        default=None,
        metadata={
            "help": "Score every n-th generation batch in BF16 and log over-clipping and noise, whatever the policy. "
            "If unset, only when the policy asks for it."
        },
    )

    # Parameters that control Calibrated Clipping
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
    clip_lower_max_change: float = field(default=0.05, metadata={"help": "Largest move of the lower bound each time."})
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
        default=None, metadata={"help": "Further keyword arguments of a colocated vLLM engine."}
    )
    vllm_sync_check_interval: int = field(
        default=1,
        metadata={
            "help": "Weight syncs between two comparisons of trainer and engine on a fixed prompt. 0 turns them off."
        },
    )
    vllm_sync_check_max_ratio: float = field(
        default=5.0,
        metadata={
            "help": "Largest difference of log-probs on the fixed prompt, in multiples of the first sync's; beyond it "
            "the run stops."
        },
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
        own = [f.name for f in fields(FP8GRPOConfig) if f.name in FP8GRPOConfig.__annotations__]
        config_checks.check_values(self, own)
        self.resolved_clip_policy, self.auto_reason = clip_checks.resolve_clip_policy(self)
        # TRL turns "auto" into a number; whether FP8 kernels need one is known only with the device
        self._pad_to_multiple_of_is_auto = self.pad_to_multiple_of == "auto"
        self._default_steps_per_generation = (
            (self.resolved_clip_policy != "fixed" or self.shadow_interval is not None)
            and self.steps_per_generation is None
            and self.generation_batch_size is None
        )
        if self._default_steps_per_generation:
            self.steps_per_generation = 4 * self.gradient_accumulation_steps
        config_checks.check_accelerate_fp8(self)
        super().__post_init__()
        config_checks.check_rollout(self)
        clip_checks.check_clip(self)

    @property
    def reference_bounds(self) -> tuple[float, float]:
        """`(1 - epsilon, 1 + epsilon_high)`: the trust region one would use in BF16."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def clip_search(self) -> ClipSearch:
        """The search record of the `clip_*` fields. `delta` above the start of the upper interval ends it."""
        values = {f.name: getattr(self, f.name) for f in fields(ClipSearch)}
        if self.delta is not None and self.delta >= self.clip_upper_min + self.clip_grid_step:
            values["clip_upper_max"] = min(self.clip_upper_max, self.delta)
        return ClipSearch(**values)

    @property
    def conversion(self) -> dict[str, Any]:
        """What [`~trl_fp8.float8.convert_model`] is given, but for the model and whether to emulate."""
        return {
            "recipe": self.fp8_recipe,
            "exclude": self.fp8_exclude_modules or (),
            "scale_rounding": self.fp8_scale_rounding,
            "fsdp_all_gather": self.fp8_fsdp_all_gather,
        }

    @property
    def rollout_quantization(self) -> str:
        """Quantisation of the vLLM engine, `"auto"` resolved; `"none"` without vLLM."""
        if not self.use_vllm:
            return "none"
        if self.vllm_quantization != "auto":
            return self.vllm_quantization
        return "none" if self.fp8_recipe == "none" else RECIPES[self.fp8_recipe].engine_quantization

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches (forward and backward passes per rank) that train on one generation batch."""
        assert self.steps_per_generation is not None  # set by GRPOConfig.__post_init__
        return self.steps_per_generation * self.num_iterations

    @property
    def reads_both_bounds(self) -> bool:
        """Whether the loss clips token ratios at both bounds, A < 0 at the lower and A > 0 at the upper one."""
        return self.loss_type in config_checks.CALIBRATED_LOSS_TYPES and self.importance_sampling_level == "token"

    @property
    def ratios_are_one(self) -> bool:
        """Whether each generation batch gets one update, so that every ratio is 1 (TRL's own condition)."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation == 0
