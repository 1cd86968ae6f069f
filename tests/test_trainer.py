"""The trainer at work: real GRPO steps, what is measured, how often the shadow runs, and what is refused."""

import json
import math

import pytest
import torch
from builders import (
    RECIPES,
    VOCABULARY,
    build_dataset,
    build_model,
    build_tokenizer,
    build_trainer,
    digits_reward,
    logged,
)
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import trl_fp8.float8.device as kernels_module
import trl_fp8.trainer as trainer_module
from trl_fp8 import CalibratedClippingCallback, ClippingPolicy, FP8GRPOConfig, FP8GRPOTrainer
from trl_fp8.clipping import ClipSearch, calibrate_bounds, importance_weight
from trl_fp8.clipping.statistics import ClipStatistics
from trl_fp8.diagnostics import Mean
from trl_fp8.float8.linear import SwitchableLinear


CALIBRATED = {"calibration_interval": 1, "max_steps": 4}


class Recorder:
    """Every micro-batch handed to the statistics, and the decision it must lead to."""

    def __init__(self, monkeypatch):
        self.batches = []
        update = ClipStatistics.update

        def spy(statistics, *tensors):
            self.batches.append(tensors)
            update(statistics, *tensors)

        monkeypatch.setattr(ClipStatistics, "update", spy)

    def pooled(self, start, stop):
        def join(index):
            parts = [batch[index] for batch in self.batches[start:stop]]
            return None if parts[0] is None else torch.cat([p.flatten() for p in parts]).unsqueeze(0)

        ratio, ref_ratio, mask, weight, ref_weight = (join(i) for i in (0, 1, 3, 4, 5))
        advantages = torch.cat(
            [
                (b[2].unsqueeze(1) if b[2].dim() == 1 else b[2]).expand(b[3].shape).flatten()
                for b in self.batches[start:stop]
            ]
        ).unsqueeze(0)
        return ratio, ref_ratio, advantages, mask, weight, ref_weight


class ForwardCounter:
    """Scoring passes of the stock trainer by precision; `high` counts those inside the shadow switch."""

    def __init__(self, monkeypatch):
        self.fp8 = self.high = 0
        score = GRPOTrainer._get_per_token_logps_and_entropies

        def spy(trainer, model, *args, **kwargs):
            switched = [m.high_precision for m in trainer.model.modules() if isinstance(m, SwitchableLinear)]
            assert all(switched) or not any(switched)
            if switched[0]:
                self.high += 1
            else:
                self.fp8 += 1
            return score(trainer, model, *args, **kwargs)

        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", spy)


# -- a real step


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bf16", [True, False])
def test_a_real_step_moves_every_parameter_and_logs_our_metrics(recipe, bf16, tmp_path):
    trainer = build_trainer(tmp_path, fp8_recipe=recipe, bf16=bf16, **CALIBRATED)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    losses = logged(trainer, "loss")
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    keys = set().union(*trainer.state.log_history)
    for key in (
        "clip_bounds/lower",
        "clip_bounds/upper_target",
        "clip_share/lower",
        "clip_share/upper_at_reference",
        "clip_share/lower_bf16",
        "update_ratio/after",
        "overclip/lower",
        "fp8/nmae_amplification",
        "fp8/noise_floor",
        "fp8/shadow_time",
        "entropy_share/above_1",
    ):
        assert key in keys
    assert logged(trainer, "fp8/num_converted_modules") == [14]
    assert trainer.clip_bounds != (0.6, 1.8)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_every_calibrated_loss_type_trains(loss_type, tmp_path):
    trainer = build_trainer(tmp_path, loss_type=loss_type, **CALIBRATED)
    trainer.train()
    assert logged(trainer, "calibration/degenerate") == [0]
    lower, upper = trainer.clip_bounds
    assert trainer.epsilon_low == 1 - lower
    assert trainer.epsilon_high == upper - 1


def test_generation_runs_the_fp8_forward(tmp_path, monkeypatch):
    trainer = build_trainer(tmp_path, max_steps=1)
    calls = []
    forward = SwitchableLinear.forward
    monkeypatch.setattr(
        SwitchableLinear, "forward", lambda m, x: calls.append((m.high_precision, x.shape[1])) or forward(m, x)
    )
    trainer.train()
    one_token = [high for high, length in calls if length == 1]
    assert len(one_token) >= 14
    assert not any(one_token)


# -- how often the shadow runs


@pytest.mark.parametrize(
    ("settings", "batches", "moved_micro_batches"),
    [
        ({}, 1, 3),  # 4 mini-batches, the first at the old weights
        ({"num_iterations": 2}, 1, 7),
        ({"gradient_accumulation_steps": 2}, 1, 6),  # 8 micro-batches, the first 2 before the first optimizer step
        # optimizer steps end after micro-batches 3, 6, 9, 12; generation batches after 4, 8, 12
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 4, "max_steps": 4}, 3, 1 + 2 + 3),
    ],
)
def test_shadow_passes_are_one_plus_one_per_moved_micro_batch_and_no_extra_fp8_pass(
    settings, batches, moved_micro_batches, tmp_path, monkeypatch
):
    settings = {"max_steps": 8 if "num_iterations" in settings else 4, **settings}
    counts = {}
    for interval in (1, 100):
        with monkeypatch.context() as patch:
            counter = ForwardCounter(patch)
            trainer = build_trainer(tmp_path / str(interval), calibration_interval=interval, **settings)
            trainer.train()
            counts[interval] = counter
    assert counts[100].high == 0
    assert counts[1].fp8 == counts[100].fp8
    assert counts[1].high == batches + moved_micro_batches


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_either_kind_decides_the_same(reentrant, tmp_path):
    """Reentrant checkpointing warns in passes without gradients, and warnings are errors here."""
    bounds = []
    for settings in (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
        {"gradient_checkpointing": False},
    ):
        trainer = build_trainer(tmp_path / str(len(bounds)), learning_rate=5e-3, **CALIBRATED, **settings)
        trainer.train()
        bounds.append((trainer.clip_bounds, logged(trainer, "update_ratio/after")))
    assert bounds[0] == bounds[1]
    assert bounds[0][0] != (0.6, 1.8)


def test_only_every_interval_th_generation_batch_is_shadowed(tmp_path, monkeypatch):
    counter = ForwardCounter(monkeypatch)
    trainer = build_trainer(tmp_path, calibration_interval=2, max_steps=20)  # 5 generation batches
    trainer.train()
    assert counter.high == 2 * (1 + 3)
    assert len(logged(trainer, "update_ratio/bf16")) == 2
    steps = [entry["step"] for entry in trainer.state.log_history if "clip_share/lower_bf16" in entry]
    assert steps == [5, 6, 7, 8, 13, 14, 15, 16]
    lower = logged(trainer, "clip_bounds/lower")
    assert lower[:8] == [0.6] * 8  # in force through the second batch; the new bound holds from the third
    assert lower[8] != 0.6
    assert lower[8:16] == [lower[8]] * 8
    assert lower[16] != lower[8]


def test_nothing_is_shadowed_where_every_ratio_is_one(tmp_path, monkeypatch, caplog):
    counter = ForwardCounter(monkeypatch)
    trainer = build_trainer(tmp_path, steps_per_generation=1, **CALIBRATED)
    trainer.train()
    assert counter.high == 0
    assert "nothing to calibrate" in caplog.text
    assert trainer.clip_bounds == (0.6, 1.8)


def test_a_run_shorter_than_the_interval_warns(tmp_path, caplog):
    build_trainer(tmp_path, max_steps=4).train()
    assert "The run ends after 1 generation batches, before the first of the recalibrations every" in caplog.text


# -- what enters the statistics


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "max_steps": 8}, {"rebalance_with": "target"}])
def test_the_streamed_decision_is_calibrate_bounds_over_the_pooled_tokens(settings, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build_trainer(tmp_path, learning_rate=5e-3, **{**CALIBRATED, **settings})
    trainer.train()
    monkeypatch.undo()
    assert len(recorder.batches) == trainer.args.micro_batches_per_generation
    expected = calibrate_bounds(*recorder.pooled(0, None)[:4], rebalance_with=settings.get("rebalance_with"))
    assert not expected.degenerate
    assert trainer.clip_bounds == (expected.lower, expected.upper)
    assert logged(trainer, "clip_bounds/lower_target") == [expected.lower_target]
    scored = [entry for entry in trainer.state.log_history if "clip_count/lower_bf16" in entry]
    clipped, negative = (sum(e[f"clip_count/{key}"] for e in scored) for key in ("lower_bf16", "negative"))
    assert clipped / negative == pytest.approx(expected.alpha_low, rel=1e-12)
    assert logged(trainer, "update_ratio/bf16") == [pytest.approx(expected.rho_ref, rel=1e-12)]
    assert logged(trainer, "update_ratio/fp8") == [pytest.approx(expected.rho_before, rel=1e-12)]
    assert logged(trainer, "update_ratio/after") == [pytest.approx(expected.rho_after, rel=1e-12)]
    ratio, ref_ratio, _, mask, *_ = recorder.pooled(0, None)
    assert not torch.equal(ratio[mask], ref_ratio[mask])


def test_the_reference_ratio_of_the_first_mini_batch_is_exactly_one(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    build_trainer(tmp_path, **CALIBRATED).train()
    first, later = recorder.batches[0], recorder.batches[1]
    assert torch.equal(first[1], torch.ones_like(first[1]))
    assert not torch.equal(later[1], torch.ones_like(later[1]))


def test_shadow_log_probs_are_those_of_an_unconverted_twin(tmp_path, monkeypatch):
    """The BF16 old log-probs equal the ones a stock trainer computes for the same weights and tokens."""
    trainer = build_trainer(tmp_path, **CALIBRATED)
    outputs = []
    generate = trainer._generate_and_score_completions
    monkeypatch.setattr(
        trainer, "_generate_and_score_completions", lambda x: outputs.append(generate(x)) or outputs[-1]
    )
    trainer.train()
    twin = build_trainer(tmp_path / "twin", cls=GRPOTrainer, config=GRPOConfig)
    twin.model.train()
    batch = outputs[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        expected, _, _ = twin._get_per_token_logps_and_entropies(
            twin.model, ids, mask, batch["completion_ids"].size(1), batch_size=8
        )
    assert torch.equal(batch["shadow_old_per_token_logps"], expected)
    assert not torch.equal(batch["old_per_token_logps"], expected)


def test_masks_of_the_loss_are_masks_of_the_statistics(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    settings = {"off_policy_mask_threshold": 1e-4, "top_entropy_quantile": 0.5, "mask_truncated_completions": True}
    masks = []
    for name in ("get_off_policy_mask", "get_high_entropy_mask"):
        original = getattr(GRPOTrainer, name)
        if name == "get_off_policy_mask":
            spy = staticmethod(lambda *a, f=original, **k: masks.append(f(*a, **k)) or masks[-1])
        else:
            spy = lambda *a, f=original, **k: masks.append(f(*a, **k)) or masks[-1]  # noqa: E731
        monkeypatch.setattr(GRPOTrainer, name, spy)
    trainer = build_trainer(tmp_path, learning_rate=5e-3, **{**CALIBRATED, **settings})
    completion_masks = []
    compute_loss = trainer.compute_loss
    monkeypatch.setattr(
        trainer,
        "compute_loss",
        lambda m, i, **k: completion_masks.append(i["completion_mask"]) or compute_loss(m, i, **k),
    )
    trainer.train()
    assert len(recorder.batches) == 4
    dropped = 0
    for i, tensors in enumerate(recorder.batches):
        entropy, off_policy = masks[2 * i], masks[2 * i + 1]
        expected = completion_masks[i].bool() & entropy.bool() & off_policy.bool()
        assert torch.equal(tensors[3], expected)
        dropped += int((completion_masks[i].bool() & ~expected).sum())
    assert dropped > 0


def test_tool_masks_leave_the_statistics(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build_trainer(tmp_path, **CALIBRATED)

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        completions = [[5, 6, 7, 8, 9, 1] for _ in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[-1.0] * 6 for _ in prompts],
            "env_mask": [[1, 1, 0, 0, 1, 1] for _ in prompts],
        }

    trainer.rollout_func = rollout
    trainer.train()
    assert len(recorder.batches) == 4
    for tensors in recorder.batches:
        assert torch.equal(tensors[3], torch.tensor([[1, 1, 0, 0, 1, 1]] * 8).bool())


def test_delta_reaches_the_statistics(tmp_path, monkeypatch):
    seen = []
    init = ClipStatistics.__init__
    monkeypatch.setattr(ClipStatistics, "__init__", lambda s, *a, **k: (seen.append(k["delta"]), init(s, *a, **k))[1])
    build_trainer(tmp_path, delta=2.5, **CALIBRATED).train()
    assert seen == [2.5]


def test_evaluation_in_between_changes_no_decision(tmp_path):
    bounds = []
    for evaluate in (False, True):
        extra = {"eval_dataset": build_dataset(8)}
        settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True} if evaluate else {}
        # greedy-like evaluation would still draw from the global RNG, so seed each generation alike
        trainer = build_trainer(tmp_path / str(evaluate), trainer=extra, learning_rate=5e-3, **CALIBRATED, **settings)
        generate = trainer._generate_single_turn

        def seeded(*args, trainer=trainer, generate=generate, **kwargs):
            torch.manual_seed(1000 + trainer.state.global_step)
            return generate(*args, **kwargs)

        trainer._generate_single_turn = seeded
        trainer.train()
        bounds.append((trainer.clip_bounds, logged(trainer, "clip_share/lower_bf16")))
        if evaluate:
            assert len(logged(trainer, "eval_loss")) >= 4
    assert bounds[0] == bounds[1]
    assert bounds[0][0] != (0.6, 1.8)


def test_peft_reference_with_beta_is_not_taken_for_the_old_policy(tmp_path, monkeypatch):
    from peft import LoraConfig

    recorder = Recorder(monkeypatch)
    peft_config = LoraConfig(r=16, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    trainer = build_trainer(tmp_path, beta=0.1, trainer={"peft_config": peft_config}, **CALIBRATED)
    assert len(trainer.conversion_report.converted) == 14
    trainer.train()
    assert torch.equal(recorder.batches[0][1], torch.ones_like(recorder.batches[0][1]))
    assert logged(trainer, "kl")
    assert trainer.clip_bounds != (0.6, 1.8)


# -- importance weights


class FakeVLLMGeneration:
    """Stands in for the engine only: random completions with sampler log-probs, one of them NaN."""

    def __init__(self, *args, processing_class, **kwargs):
        self.vocabulary = len(processing_class)

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(3, self.vocabulary, (6,), generator=generator).tolist() for _ in prompts]
        logps = [[[-3.1 + 0.8 * torch.randn((), generator=generator).item()] for _ in row] for row in ids]
        logps[1][2] = [None]
        return None, ids, logps, None


@pytest.fixture
def fake_engine(monkeypatch):
    import trl.trainer.grpo_trainer as upstream

    monkeypatch.setattr("trl_fp8.rollout.colocate.RolloutEngine", FakeVLLMGeneration)
    monkeypatch.setattr(upstream, "is_vllm_available", lambda *a, **k: True, raising=False)
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *a, **k: True)
    monkeypatch.setattr(
        "trl_fp8.rollout.colocate.check_arguments", lambda args: None
    )  # asks the vLLM that is not here


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_quantization": "none"}


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weight_equals_trls_ratio_on_a_real_batch(mode, tmp_path, fake_engine):
    trainer = build_trainer(
        tmp_path, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=0.4, **VLLM, **CALIBRATED
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    ours = importance_weight(
        batch["old_per_token_logps"],
        batch["sampling_per_token_logps"],
        batch["completion_mask"],
        mode=mode,
        clip_min=0.4,
        clip_max=2.0,
    )
    theirs = batch["importance_sampling_ratio"].expand(ours.shape)
    scored = ~batch["sampling_per_token_logps"].isnan()
    assert scored.sum() == scored.numel() - 1
    assert torch.equal(ours, theirs)
    assert (theirs[~scored] == 0).all()  # TRL alone would say 1
    assert theirs.unique().numel() > 2


def test_a_batch_that_is_scored_in_full_keeps_trls_weights(tmp_path, fake_engine, monkeypatch):
    class Scored(FakeVLLMGeneration):
        def generate(self, *args, **kwargs):
            _, ids, logps, _ = super().generate(*args, **kwargs)
            return None, ids, [[[-3.0] if lp == [None] else lp for lp in row] for row in logps], None

    monkeypatch.setattr("trl_fp8.rollout.colocate.RolloutEngine", Scored)
    trainer = build_trainer(tmp_path, vllm_importance_sampling_mode="sequence_mask", **VLLM, **CALIBRATED)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    assert batch["importance_sampling_ratio"].shape == (8, 1)


def test_off_keeps_trls_weight_of_an_unscored_token(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLMGeneration)  # off: the engine is TRL's
    settings = {"fp8_recipe": "none", "clip_policy": "fixed", "steps_per_generation": 4}
    trainer = build_trainer(tmp_path, **VLLM, **settings)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    unscored = batch["sampling_per_token_logps"].isnan()
    assert unscored.any()
    assert (batch["importance_sampling_ratio"][unscored] == 1).all()


def test_vespo_which_multiplies_the_weights_of_a_response_keeps_trls(tmp_path, fake_engine):
    settings = {"loss_type": "vespo", "clip_policy": "fixed", "steps_per_generation": 4}
    trainer = build_trainer(tmp_path, **VLLM, **settings)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    unscored = batch["sampling_per_token_logps"].isnan()
    assert unscored.any()
    assert (batch["importance_sampling_ratio"].expand(unscored.shape)[unscored] == 1).all()


def test_the_mismatch_of_a_generation_batch_is_logged(tmp_path, fake_engine, caplog):
    trainer = build_trainer(tmp_path, **VLLM, **CALIBRATED)
    trainer.train()
    (logs,) = [entry for entry in trainer.state.log_history if "mismatch/kl" in entry]
    # 32 completions of 6 tokens with one NaN; log w = trainer - (-3.1 + 0.8 N(0, 1)) and the trainer is near uniform
    # over 25 tokens: -3.2
    assert logs["mismatch/unscored"] == 1 / 192
    assert 0 < logs["mismatch/ess"] < 1
    assert logs["mismatch/kl"] == pytest.approx(0.1, abs=0.2)
    assert logs["mismatch/ratio_raw_max"] > logs["mismatch/ratio_raw_p99"] > 2
    assert logs["mismatch/frac_truncated"] == pytest.approx(0.17, abs=0.1)
    assert caplog.text.count("mismatch/unscored=") == 1


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_the_weight_of_the_loss_is_the_weight_of_the_statistics(mode, tmp_path, fake_engine, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build_trainer(tmp_path, vllm_importance_sampling_mode=mode, **VLLM, **CALIBRATED)
    used = []
    compute_loss = GRPOTrainer._compute_loss
    monkeypatch.setattr(
        GRPOTrainer,
        "_compute_loss",
        lambda t, m, i: used.append(i["importance_sampling_ratio"]) or compute_loss(t, m, i),
    )
    trainer.train()
    assert len(recorder.batches) == 4
    for weight, tensors in zip(used, recorder.batches, strict=True):
        assert torch.equal(tensors[4], weight)
        assert torch.equal(tensors[3], tensors[3] & (weight != 0))
        assert tensors[5] is not None
        assert not torch.equal(tensors[5][tensors[3]], weight.expand(tensors[3].shape)[tensors[3]])


# -- policies


class FixedPolicy(ClippingPolicy):
    bounds = (0.5, 1.5)

    def __init__(self):
        self.events = []

    def on_generation_begin(self, trainer):
        self.events.append(("begin", trainer.state.global_step))
        trainer.collect_clip_statistics([0.7], [1.3], shadow=False)
        trainer.clip_bounds = (0.5, 1.5)

    def on_generation_end(self, trainer):
        numbers = trainer.clip_statistics.numbers()
        self.events.append(("end", numbers.fp8.num_negative, numbers.bf16.num_negative))
        trainer.record_metrics({"policy/share": Mean(numbers.fp8.lower_clipped[0.7], numbers.fp8.num_negative)})


def test_a_custom_policy_gets_its_events_and_replaces_ours(tmp_path, caplog):
    policy = FixedPolicy()
    trainer = build_trainer(tmp_path, trainer={"callbacks": [policy]}, max_steps=9)
    assert trainer.clip_bounds == (0.5, 1.5)
    assert not any(isinstance(c, CalibratedClippingCallback) for c in trainer.callback_handler.callbacks)
    assert not caplog.text
    trainer.train()
    assert [event[0] for event in policy.events] == ["begin", "end", "begin", "end", "begin"]
    assert [event[1] for event in policy.events if event[0] == "begin"] == [0, 4, 8]
    assert all(event[1] > 0 and event[2] == 0 for event in policy.events if event[0] == "end")
    assert len(logged(trainer, "policy/share")) == 2
    assert set(logged(trainer, "clip_bounds/lower")) == {0.5}


def test_a_policy_added_later_starts_from_its_bounds(tmp_path):
    class StartsWide(ClippingPolicy):
        bounds = (0.55, 1.9)

    trainer = build_trainer(tmp_path, clip_policy="fixed", steps_per_generation=4, max_steps=4)
    trainer.add_callback(StartsWide())
    trainer.train()
    assert trainer.clip_bounds == (0.55, 1.9)
    assert set(logged(trainer, "clip_bounds/lower")) == {0.55}


def test_settings_a_custom_policy_ignores_are_named(tmp_path, caplog):
    build_trainer(tmp_path, trainer={"callbacks": [FixedPolicy()]}, clip_lower_init=0.7, calibration_interval=3)
    assert "No effect of calibration_interval, clip_lower_init in FP8GRPOConfig" in caplog.text


def test_two_policies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 clipping policies.*Pass one"):
        build_trainer(tmp_path, trainer={"callbacks": [FixedPolicy(), CalibratedClippingCallback()]})


def test_a_policy_cannot_ask_for_a_shadow_where_every_ratio_is_one(tmp_path):
    trainer = build_trainer(tmp_path, steps_per_generation=1)
    trainer._batch.beginning = True
    with pytest.raises(ValueError, match="every ratio is 1"):
        trainer.collect_clip_statistics([0.8], [1.2], shadow=True)


def test_statistics_are_asked_for_at_the_begin_only(tmp_path):
    trainer = build_trainer(tmp_path)
    with pytest.raises(RuntimeError, match="outside on_generation_begin"):
        trainer.collect_clip_statistics([0.8], [1.2], shadow=False)


def test_a_second_policy_added_later_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, max_steps=1)
    trainer.add_callback(FixedPolicy())
    with pytest.raises(ValueError, match="2 clipping policies"):
        trainer.train()


def test_bounds_must_stay_below_delta(tmp_path):
    trainer = build_trainer(tmp_path, delta=2.5)
    with pytest.raises(ValueError, match="exceed delta=2.5"):
        trainer.clip_bounds = (0.8, 3.0)


def test_a_micro_batch_whose_backward_fails_counts_once(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build_trainer(tmp_path, **CALIBRATED)
    backward, calls = trainer.accelerator.backward, []

    def fails_once(loss, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return backward(loss, **kwargs)

    monkeypatch.setattr(trainer.accelerator, "backward", fails_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.train()
    assert len(recorder.batches) == 4 + 1  # the batch, and the first micro-batch of the next


def test_bounds_must_enclose_one(tmp_path):
    trainer = build_trainer(tmp_path)
    for bounds in ((1.1, 1.2), (0.5, 0.9), (0.0, 1.2), (math.nan, 1.2), (1e-300, 1.2), (0.8, 1e39)):
        with pytest.raises(ValueError, match="do not enclose"):
            trainer.clip_bounds = bounds


def test_calibration_off_keeps_the_bounds_at_epsilon(tmp_path):
    trainer = build_trainer(tmp_path, clip_policy="fixed", epsilon=0.4, epsilon_high=0.3, max_steps=2)
    trainer.train()
    assert trainer.clip_bounds == (0.6, 1.3)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.4, 0.3)


def test_degenerate_batches_keep_both_bounds_and_say_so(tmp_path, caplog):
    constant = {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)}
    trainer = build_trainer(tmp_path, trainer=constant, **CALIBRATED)
    trainer.train()
    assert trainer.clip_bounds == (0.6, 1.8)
    assert logged(trainer, "calibration/degenerate") == [1]
    assert "0 tokens of negative and 0 of positive advantage" in caplog.text


# -- the start-up line


def test_the_start_up_line_says_what_is_in_force(tmp_path, capsys):
    build_trainer(tmp_path, gradient_accumulation_steps=2, calibration_interval=3)
    out = capsys.readouterr().out
    assert "14/15 linear layers train in FP8 (rowwise)" in out
    assert "1 kept: output embedding (lm_head)" in out
    line = out.splitlines()[-1]
    for part in (
        "fp8_recipe=rowwise",
        "14/15 layers (emulated)",
        "transformers with the training forward (FP8)",
        "clip bounds [0.6, 1.8] (a resumed run's are those of its checkpoint)",
        "BF16 reference [0.8, 1.24]",
        "first recalibration after generation batch 3 (optimizer step 12)",
        "steps_per_generation=8",
    ):
        assert part in line


# -- refusals that need the model, the data or the trainer


def test_a_stock_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a GRPOConfig.*Pass FP8GRPOConfig"):
        build_trainer(tmp_path, config=GRPOConfig)


def test_no_config_gets_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer_module, "FP8GRPOConfig", lambda name: FP8GRPOConfig(name, use_cpu=True, report_to=[]))
    model = build_model()
    model.config._name_or_path = "somewhere/Tiny"
    trainer = FP8GRPOTrainer(model, digits_reward, train_dataset=build_dataset(), processing_class=build_tokenizer())
    assert trainer.args.output_dir == "Tiny-FP8-GRPO"
    assert trainer.args.fp8_recipe == "rowwise"


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "compressed-tensors"])
def test_quantised_checkpoints_are_refused_before_loading(method, tmp_path):
    model = build_model()
    model.config.quantization_config = {"quant_method": method, "load_in_4bit": True}
    with pytest.raises(ValueError, match=f"quantised checkpoint \\(quant_method '{method}'\\).*BF16 or FP32"):
        build_trainer(tmp_path / "a", model=model)
    model.config.save_pretrained(tmp_path / "checkpoint")  # no weights: refused before they are looked for
    with pytest.raises(ValueError, match="quantised checkpoint"):
        build_trainer(tmp_path / "b", model=str(tmp_path / "checkpoint"))


def test_a_quantization_config_is_refused(tmp_path):
    from transformers import BitsAndBytesConfig

    with pytest.raises(ValueError, match="quantization_config=BitsAndBytesConfig quantises the weights"):
        build_trainer(tmp_path, trainer={"quantization_config": BitsAndBytesConfig(load_in_8bit=True)})


def test_data_parallel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(FP8GRPOConfig, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="does not support `nn.DataParallel`"):
        build_trainer(tmp_path)


@pytest.mark.parametrize("size", [0, 3])
def test_a_train_set_without_one_generation_batch_is_refused(size, tmp_path):
    with pytest.raises(ValueError, match=f"train_dataset has {size} prompts, and one generation batch takes 8"):
        build_trainer(tmp_path, trainer={"train_dataset": build_dataset(size)})


def test_active_dropout_is_refused_with_calibration_only(tmp_path):
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        build_trainer(tmp_path, model=build_model(attention_dropout=0.1))
    build_trainer(tmp_path, model=build_model(attention_dropout=0.1), clip_policy="fixed")


def test_lora_dropout_is_refused_with_calibration(tmp_path):
    from peft import LoraConfig

    peft_config = LoraConfig(r=16, target_modules=["q_proj"], lora_dropout=0.05)
    with pytest.raises(ValueError, match="Dropout is active .*lora_dropout"):
        build_trainer(tmp_path, trainer={"peft_config": peft_config})
    build_trainer(tmp_path, trainer={"peft_config": peft_config}, disable_dropout=True)


def test_bf16_weights_whose_updates_vanish_warn(tmp_path, caplog):
    build_trainer(tmp_path, model=build_model().to(torch.bfloat16), learning_rate=1e-6)
    assert "most updates vanish. Load the model in float32" in caplog.text
    caplog.clear()
    build_trainer(tmp_path, model=build_model(), learning_rate=1e-6)
    assert "vanish" not in caplog.text


def test_rewards_of_the_wrong_length_name_the_function(tmp_path):
    trainer = build_trainer(tmp_path, trainer={"reward_funcs": lambda completions, **kwargs: [0.0]})
    with pytest.raises(ValueError, match="'<lambda>' returned 1 rewards, but 32 were expected"):
        trainer.train()


@pytest.mark.parametrize("returned", [None, 1.0])
def test_rewards_that_are_no_list_name_the_functions(returned, tmp_path):
    def forgot(completions, **kwargs):
        return returned

    trainer = build_trainer(tmp_path, trainer={"reward_funcs": [digits_reward, forgot]})
    with pytest.raises(ValueError, match=r"\(digits_reward or forgot\) did not return a list.*Return such a list"):
        trainer.train()


def test_an_error_inside_a_reward_function_stays_its_own(tmp_path):
    def broken(completions, **kwargs):
        return len(None)

    trainer = build_trainer(tmp_path, trainer={"reward_funcs": broken})
    with pytest.raises(TypeError, match="has no len"):
        trainer.train()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_train_set_without_prompts_is_refused(streaming, tmp_path):
    dataset = Dataset.from_dict({"question": ["1+1="] * 64})
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    with pytest.raises(ValueError, match="no column 'prompt' \\(it has question\\).*rename_column"):
        build_trainer(tmp_path, trainer={"train_dataset": dataset}, max_steps=1)


def test_columns_are_checked_without_reading_a_row(tmp_path):
    def explode(rows):
        raise AssertionError("a row was read")

    transformed = build_dataset().rename_column("prompt", "x").with_transform(explode)  # may well yield prompts
    build_trainer(tmp_path, trainer={"train_dataset": transformed})
    stream = IterableDataset.from_generator(explode, gen_kwargs={"rows": [0]})
    build_trainer(tmp_path, trainer={"train_dataset": stream}, max_steps=1)


def test_reward_functions_that_cannot_be_called_are_told_so(tmp_path):
    def forgetful(completions):
        return [1.0] * len(completions)

    trainer = build_trainer(tmp_path, trainer={"reward_funcs": forgetful})
    with pytest.raises(ValueError, match=r"\(forgetful\) cannot be called with what TRL passes.*and \*\*kwargs"):
        trainer.train()


def test_off_trains_on_where_no_function_gives_a_reward(tmp_path):
    settings = {"fp8_recipe": "none", "clip_policy": "fixed", "max_steps": 2}
    trainer = build_trainer(
        tmp_path, trainer={"reward_funcs": lambda completions, **kwargs: [None] * len(completions)}, **settings
    )
    trainer.train()
    assert trainer.state.global_step == 2


class ChangesSettings(TrainerCallback):
    """Between the begin and the end of the first generation batch."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.change(args)


@pytest.mark.parametrize("what", ["epsilon", "clip_lower", "search", "calibration_interval"])
def test_a_decision_is_made_with_the_settings_its_batch_began_with(what, tmp_path):
    policy = CalibratedClippingCallback(calibration_interval=1)
    changes = {
        "epsilon": lambda args: setattr(args, "epsilon", 0.15),
        "clip_lower": lambda args: setattr(policy, "clip_lower", 0.75),
        "search": lambda args: setattr(policy, "search", ClipSearch(clip_grid_step=0.05)),
        "calibration_interval": lambda args: setattr(policy, "calibration_interval", 3),
    }
    bounds = []
    for callbacks in ([policy, ChangesSettings(changes[what])], [CalibratedClippingCallback(calibration_interval=1)]):
        trainer = build_trainer(tmp_path, trainer={"callbacks": callbacks}, max_steps=4)
        trainer.train()
        bounds.append(trainer.clip_bounds)
    assert bounds[0] == bounds[1] != (0.6, 1.8)


def test_a_policy_added_in_training_is_saved(tmp_path):
    added = CalibratedClippingCallback(calibration_interval=1)

    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                trainer.add_callback(added)

    trainer = build_trainer(
        tmp_path,
        trainer={"callbacks": [Adds()]},
        clip_policy="fixed",
        steps_per_generation=4,
        max_steps=8,
        save_strategy="steps",
        save_steps=8,
    )
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["CalibratedClippingCallback"] == added.state()
    assert added.num_completed_generation_batches == 1


def test_metrics_recorded_before_a_last_evaluation_reach_the_log(tmp_path):
    settings = {"logging_steps": 3, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trainer = build_trainer(tmp_path, trainer={"eval_dataset": build_dataset(8)}, **settings)
    trainer.train()
    last = trainer.state.log_history[-1]
    assert "train_runtime" in last
    assert last["clip_bounds/lower"] == 0.6


def test_a_judge_that_is_down_for_a_batch_is_named_and_the_run_goes_on(tmp_path, caplog):
    def silent(completions, **kwargs):
        return [None] * len(completions)

    trainer = build_trainer(tmp_path, trainer={"reward_funcs": [silent, silent]}, max_steps=4)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert caplog.text.count("any of the 32 samples of the generation batch (silent, silent)") == 1
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())  # nothing is learned
    # one function that does not apply is legal
    trainer = build_trainer(tmp_path / "b", trainer={"reward_funcs": [silent, digits_reward]}, max_steps=1)
    trainer.train()


def test_real_kernels_need_padding_and_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels_module, "resolve_emulation", lambda *a: False)
    args = build_trainer(tmp_path).args
    assert args.pad_to_multiple_of == 16
    assert build_trainer(tmp_path, fp8_recipe="rowwise_with_gw_hp").args.pad_to_multiple_of is None
    assert build_trainer(tmp_path, pad_to_multiple_of=32).args.pad_to_multiple_of == 32
    for value in (None, 8, 24):
        with pytest.raises(ValueError, match=f"pad_to_multiple_of={value} lets"):
            build_trainer(tmp_path, pad_to_multiple_of=value)
    with pytest.raises(ValueError, match="bf16=False with fp8_recipe='rowwise'"):
        build_trainer(tmp_path, bf16=False)
    assert build_trainer(tmp_path, fp8_recipe="blockwise").args.pad_to_multiple_of is None


def test_emulation_leaves_padding_alone(tmp_path):
    assert build_trainer(tmp_path).args.pad_to_multiple_of is None


def test_bf16_training_with_calibration_warns(tmp_path, caplog):
    build_trainer(tmp_path, fp8_recipe="none")
    assert "calibration only moves the bounds to the reference bounds" in caplog.text


def test_search_settings_reach_the_callback(tmp_path):
    trainer = build_trainer(tmp_path, clip_lower_min=0.4, clip_upper_max_change=0.2, rebalance_with="target")
    (policy,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ClippingPolicy))
    assert policy.search == ClipSearch(clip_lower_min=0.4, clip_upper_max_change=0.2, rebalance_with="target")


# -- what an interrupted or repeated run must not get wrong


def test_training_again_inside_a_batch_knows_that_the_weights_have_moved(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    trainer = build_trainer(tmp_path, calibration_interval=1, max_steps=2, learning_rate=5e-3)
    trainer.train()
    trainer.train()  # the second half of the buffered batch, with global_step back at 0
    assert len(recorder.batches) == 4
    assert torch.equal(recorder.batches[0][1], torch.ones_like(recorder.batches[0][1]))
    for tensors in recorder.batches[1:]:
        assert not torch.equal(tensors[1], torch.ones_like(tensors[1]))
    assert trainer.clip_bounds != (0.6, 1.8)


@pytest.mark.parametrize("interval", [1, 2])
def test_resuming_in_the_interrupted_process_ignores_what_is_left_of_the_old_batch(interval, tmp_path):
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        armed = True

        def on_step_end(self, args, state, control, **kwargs):
            if self.armed and state.global_step == 10:
                self.armed = False
                raise KeyboardInterrupt

    trainer = build_trainer(
        tmp_path,
        calibration_interval=interval,
        max_steps=16,
        save_strategy="steps",
        save_steps=4,
        learning_rate=5e-3,
        trainer={"callbacks": [Interrupt()]},
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (policy,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ClippingPolicy))
    # 12 steps: 2 on the old batch, which counts nowhere, two batches, and 2 of a third
    assert policy.num_completed_generation_batches == 1 + 2


def test_an_exception_in_a_reward_leaves_no_scope_open(tmp_path):
    calls = []

    def fails_once(completions, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("reward server is down")
        return digits_reward(completions)

    trainer = build_trainer(tmp_path, trainer={"reward_funcs": fails_once}, **CALIBRATED)
    with pytest.raises(RuntimeError, match="reward server"):
        trainer.train()
    assert trainer._batch.capture is None
    trainer.train()
    assert logged(trainer, "calibration/degenerate") == [0]


def test_a_refused_construction_leaves_the_model_unconverted(tmp_path):
    model = build_model()
    with pytest.raises(ValueError, match="2 clipping policies"):
        build_trainer(tmp_path, model=model, trainer={"callbacks": [FixedPolicy(), CalibratedClippingCallback()]})
    assert not any(isinstance(module, SwitchableLinear) for module in model.modules())
    build_trainer(tmp_path, model=model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, "does not read both clip bounds"),
        ({"importance_sampling_level": "sequence"}, "one ratio per sequence"),
        ({"delta": 1.5}, "delta=1.5 leaves no room"),
        ({"epsilon": 1.2}, "epsilon=1.2 puts"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 adds noise"),
    ],
)
def test_a_callback_of_ones_own_meets_the_same_conditions(settings, message, tmp_path):
    callbacks = {"callbacks": [CalibratedClippingCallback()]}
    with pytest.raises(ValueError, match=message):
        build_trainer(tmp_path, trainer=callbacks, steps_per_generation=4, **settings)


def test_router_noise_and_adapter_dropout_of_any_name_are_refused(tmp_path):
    from peft import LoHaConfig
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        router_jitter_noise=0.3,
    )
    with pytest.raises(ValueError, match="jitter_noise=0.3"):
        build_trainer(tmp_path, model=MixtralForCausalLM(config))
    peft_config = LoHaConfig(r=8, target_modules=["q_proj"], rank_dropout=0.3)
    with pytest.raises(ValueError, match="rank_dropout=0.3"):
        build_trainer(tmp_path, trainer={"peft_config": peft_config})


@pytest.mark.parametrize("settings", [{"loss_type": "cispo"}, {"importance_sampling_level": "sequence"}])
def test_losses_that_do_not_read_both_bounds_log_no_clip_metrics(settings, tmp_path):
    trainer = build_trainer(tmp_path, clip_policy="fixed", steps_per_generation=4, max_steps=4, **settings)
    trainer.train()
    keys = set().union(*trainer.state.log_history)
    assert "entropy_share/above_1" in keys
    assert not {key for key in keys if key.startswith("clip_bounds/") or key.startswith("clip_share/lower")}


def test_settings_of_the_default_policy_are_not_called_ignored(tmp_path, caplog):
    build_trainer(tmp_path, **{**CALIBRATED, "clip_lower_init": 0.7}).train()
    assert "No effect of" not in caplog.text


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_that_is_missing_is_named_at_once(mode, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *a, **k: False)
    with pytest.raises(ImportError, match="use_vllm=True, and vLLM is not installed here.*Install"):
        build_trainer(tmp_path, use_vllm=True, vllm_mode=mode, steps_per_generation=4)


def test_the_start_up_line_names_what_makes_a_run_do_less_than_it_seems(tmp_path, capsys):
    build_trainer(tmp_path, clip_policy="fixed")
    assert "steps_per_generation=1: one update per generation batch, so every ratio is 1" in capsys.readouterr().out
    build_trainer(tmp_path, save_strategy="steps", save_steps=3)
    assert "save_steps=3 is not a multiple of the 4 optimizer steps per generation batch" in capsys.readouterr().out
    build_trainer(tmp_path, save_strategy="steps", save_steps=8)
    out = capsys.readouterr().out
    assert "save_steps" not in out
    assert "every ratio is 1" not in out
