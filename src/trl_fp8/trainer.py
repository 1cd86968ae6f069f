"""`FP8GRPOTrainer`: TRL's GRPO trainer with FP8 linears and Calibrated Clipping. Every override adds to its parent."""

import inspect
import logging
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from . import checks, clip_checks
from .checkpoints import WholeCheckpoints
from .config import FP8GRPOConfig
from .diagnostics import upper_tail
from .diagnostics.alarms import mismatch_alarms
from .diagnostics.record import (
    BatchRecord,
    Capture,
    drop_unscored,
    measure_micro_batch,
    measure_rollout,
)
from .diagnostics.window import MetricWindow
from .distributed import World
from .float8 import device
from .float8.all_gather import Float8ScaleCallback, check_shards
from .float8.compile import compile_layers, eagerly
from .float8.convert import ConversionReport, convert_model
from .float8.shadow import shadow_pass
from .policy_host import PolicyHost, with_clip_policy
from .reference import ReferencePrecision, own_precision_of_reference
from .rollout import colocate
from .startup import startup_line


logger = logging.getLogger(__name__)


class FP8GRPOTrainer(PolicyHost, ReferencePrecision, WholeCheckpoints):
    """GRPO in FP8, stable: [`~trl.GRPOTrainer`] whose linears train in FP8 and whose clip bounds are calibrated.

    Takes the arguments of [`~trl.GRPOTrainer`], with [`FP8GRPOConfig`] as `args`. With `fp8_recipe="none"` and
    `clip_policy="fixed"` it is `GRPOTrainer`, bit for bit, with more metrics.

    Raises:
        ValueError, TypeError: a setting, the model or the data cannot give what was asked for.

    Attributes:
        conversion_report ([`~trl_fp8.float8.ConversionReport`] or `None`): what was converted.
        clip_statistics ([`~trl_fp8.clipping.ClipStatistics`] or `None`): of the last generation batch a policy asked
            for, summed over ranks.
    """

    args: FP8GRPOConfig
    model: PreTrainedModel

    _tag_names = ["trl", "grpo", "fp8"]
    _name = "FP8-GRPO"
    _paper = {
        "title": "Towards Full Pipeline FP8 Reinforcement Learning for LLMs",
        "id": "2609.22870",
    }

    def __init__(self, model, reward_funcs=None, args: FP8GRPOConfig | None = None, *positional: Any, **kwargs: Any):
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = FP8GRPOConfig(f"{name.split('/')[-1]}-FP8-GRPO")
        given = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **kwargs)
        checks.check_arguments(args, model, given.arguments.get("quantization_config"))
        given.arguments["callbacks"] = with_clip_policy(given.arguments.get("callbacks"), args)
        self._window = MetricWindow()
        self._batch = BatchRecord()
        self.conversion_report: ConversionReport | None = None
        recipe = args.fp8_recipe
        self._emulated = recipe != "none" and device.resolve_emulation(recipe, args.fp8_emulate, args.device)
        if recipe != "none" and not self._emulated:
            args.pad_to_multiple_of = checks.padding_for_kernels(
                recipe, args.bf16, args.pad_to_multiple_of, args._pad_to_multiple_of_is_auto
            )
        self._prepared = False
        self._alarms_raised: set[str] = set()

        # Errors of the model come before the engine, which takes long to start
        with colocate.engine_context(args, self._prepare_model, self.record_metrics, policy=model):
            super().__init__(*given.args, **given.kwargs)
        # On the instance: TRL's is static, and code of others calls it on the class
        self.get_off_policy_mask = self._with_token_weights(self.get_off_policy_mask)
        self._clip_bounds = args.reference_bounds
        self._prepare_model()
        self._start_policy()
        self._announce()

    # -- construction ------------------------------------------------------------------------------------------------

    def _prepare_model(self) -> ConversionReport | None:
        if self._prepared:
            return self.conversion_report
        self._prepared, args = True, self.args
        world = World.of(self.accelerator)
        checks.check_dataset(self.train_dataset, args)
        clip_checks.check_policies(self._policies(), args)
        checks.check_model(self.model, args, world, self._policies())
        if args.fp8_recipe != "none":
            self.conversion_report = convert_model(self.model, emulate=self._emulated, **args.conversion)
            if args.fp8_fsdp_all_gather:
                check_shards(self.model, world.num_shards)
                self.add_callback(Float8ScaleCallback(self.ref_model))
            if args.fp8_compile:
                compile_layers(self.model)
            self._window.record({"fp8/num_converted_modules": float(len(self.conversion_report.converted))})
        return self.conversion_report

    def _announce(self) -> None:
        if self.accelerator.is_main_process:
            if self.conversion_report is not None:
                print(self.conversion_report)  # noqa: T201 - asked for FP8, the user must see what became of it
            processes = str(World.of(self.accelerator))
            line = startup_line(self.args, self.conversion_report, self.clip_bounds, self._policies(), processes)
            print(line)  # noqa: T201

    def _is_plain_grpo(self) -> bool:
        """Whether everything of ours is off, and what TRL does holds to the bit."""
        return self.args.fp8_recipe == self.args.rollout_quantization == "none" and not self._policies()

    # -- overrides: add, then call the parent -------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with checks.naming_reward_functions(self.reward_func_names):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training and not self._is_plain_grpo():
            checks.warn_without_rewards(rewards, self.reward_func_names)
        return rewards

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with eagerly(self.args.fp8_compile):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return self._finish_rollout(super()._generate_and_score_completions(inputs))
        batch = self._begin_batch()
        with batch.capturing(shadow=batch.shadow) as capture:
            output = super()._generate_and_score_completions(inputs)
        # Without old log-probs the first forward may have been the reference model's
        if capture.shadow_per_token_logps is not None and "old_per_token_logps" in output:
            output["shadow_old_per_token_logps"] = capture.shadow_per_token_logps
        return self._finish_rollout(output)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        with own_precision_of_reference(self.model, self.args):
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        capture = self._batch.capture
        if capture is not None and capture.per_token_logps is None:
            capture.per_token_logps = result[0].detach()
            capture.entropies = None if result[1] is None else result[1].detach()
            if capture.shadow:
                kwargs = {**kwargs, "compute_entropy": False, "compute_aux_loss": False}
                checkpointing = cast(Any, self.args.gradient_checkpointing_kwargs)
                eager = self.args.fp8_compile
                with shadow_pass(self.model, self.accelerator.device, checkpointing, eager) as watch:
                    shadow = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
                capture.shadow_per_token_logps = shadow[0]
                self._batch.shadow_seconds += watch.seconds
            self._ask_for_bounds(capture)
        return result

    def get_high_entropy_mask(self, *args, **kwargs):
        mask = super().get_high_entropy_mask(*args, **kwargs)
        if self._batch.capture is not None:
            self._batch.capture.masks.append(mask.detach())
        return mask

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = self._batch
        settings = {
            # Before the first optimizer step on a batch the weights are those of the first shadow pass
            "shadow": "shadow_old_per_token_logps" in inputs and batch.weights_moved,
            "inputs": inputs,
            "weighted": self.use_vllm and self.vllm_importance_sampling_correction,
            "bounds": self.clip_bounds,
        }
        with batch.capturing(**settings) as capture, self._clipping_by_policy():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch.unmeasured = capture
        return loss

    def training_step(self, model, inputs, num_items_in_batch):
        output = super().training_step(model, inputs, num_items_in_batch)
        batch = self._batch
        # After the backward pass: a micro-batch that fails there is trained on again, and must count once
        assert batch.unmeasured is not None  # the parent computes a loss
        self._measure(batch, batch.unmeasured)
        batch.unmeasured = None
        if self._step % self.args.micro_batches_per_generation == 0:
            self._end_batch()
        if self.accelerator.sync_gradients:
            batch.weights_moved = True  # by the optimizer step that follows
            self._window.reduce(self.sum_over_ranks)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training or "train_runtime" in logs:  # the last log of a run that ends with an evaluation
            logs.update(self._window.flush())
            for message in mismatch_alarms(logs, self._alarms_raised):
                logger.warning(message)
        super().log(logs, start_time)

    # -- measuring ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _finish_rollout(self, output: dict[str, Any]) -> dict[str, Any]:
        if not self._is_plain_grpo() and self.args.loss_type != "vespo":  # which multiplies the weights of a response
            drop_unscored(output)
        weighted = "importance_sampling_ratio" in output
        if self.model.training and {"old_per_token_logps", "sampling_per_token_logps"} <= output.keys():
            metrics, ratios = measure_rollout(output, self.vllm_importance_sampling_mode if weighted else None)
            ratios = self.accelerator.pad_across_processes(ratios, pad_index=cast(int, float("nan")))
            self.record_metrics({**metrics, **upper_tail(cast(Tensor, self.accelerator.gather(ratios)))})
        return output

    @torch.no_grad()
    def _measure(self, batch: BatchRecord, capture: Capture) -> None:
        self.record_metrics(measure_micro_batch(batch, capture, self.args))
