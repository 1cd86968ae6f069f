"""GRPO with training and rollout in FP8, in one process with a real engine."""

import pytest
import torch


pytest.importorskip("vllm")

from builders import logged
from seam import BoundsInForce, DropEverySecond, Ones, WithoutEverySecond, run, same
from vllm_helpers import ENGINE_KWARGS, build_vllm_trainer, score

from trl_fp8.rollout import _upstream


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    trainer = build_vllm_trainer(tmp_path_factory.mktemp("grpo"), calibration_interval=1, max_steps=8)
    trainer.train()
    return trainer


def test_both_sides_are_fp8_and_both_bounds_are_calibrated(finished):
    assert finished.args.rollout_quantization == "fp8_per_channel"
    assert len(finished.conversion_report.converted) == 14
    assert logged(finished, "clip_bounds/lower")[-1] != 0.6
    assert logged(finished, "calibration/degenerate") == [0.0, 0.0]
    assert len(logged(finished, "loss")) == 8
    assert all(torch.isfinite(torch.tensor(logged(finished, "loss"))))


def test_the_engine_was_synced_once_per_generation_batch(finished):
    # float32 masters, sent before generation batches 1 and 2
    num_bytes = 4 * sum(p.numel() for p in finished.model.parameters())
    assert logged(finished, "rollout/sync_bytes") == [num_bytes] * 2
    seconds = logged(finished, "rollout/sync_time")
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_the_mismatch_is_logged_once_per_generation_batch(finished):
    assert len(logged(finished, "mismatch/k3_kl")) == 2
    assert max(logged(finished, "mismatch/k3_kl")) < 0.02
    assert min(logged(finished, "mismatch/ess")) > 0.9
    assert logged(finished, "mismatch/unscored") == [0.0, 0.0]


def test_after_training_the_engine_follows_the_trainer(finished):
    before = score(finished.vllm_generation.llm)
    finished.vllm_generation.sync_weights()
    assert not torch.equal(score(finished.vllm_generation.llm), before)


def test_the_start_up_line_and_the_warning_of_an_unequal_pair(tmp_path, capsys, caplog):
    build_vllm_trainer(tmp_path, fp8_recipe="none", vllm_quantization="fp8_per_channel")
    assert "rollout: vLLM in fp8_per_channel (correction token_truncate)" in capsys.readouterr().out
    assert caplog.text.count("the engine quantises and the trainer does not") == 1


def test_a_bf16_rollout_goes_through_the_same_sync(tmp_path):
    """TRL's own sync raises where vLLM packs BF16 weights, as on CPUs with AVX-512."""
    trainer = build_vllm_trainer(tmp_path, vllm_quantization="none", max_steps=1)
    trainer.train()
    assert len(logged(trainer, "rollout/sync_time")) == 1


# -- the seam of the clip policy


def test_a_policy_beside_an_engine_changes_what_it_says_and_nothing_else(tmp_path):
    """As `tests/clipping/test_seam.py`, with the engine's samples and the mismatch weight in the loss."""
    stock = run(tmp_path / "stock", build=build_vllm_trainer)
    assert stock["clipped"] > 0
    for policy in (Ones, BoundsInForce):
        assert same(stock, run(tmp_path / policy.__name__, policy, build=build_vllm_trainer))
    dropped = run(tmp_path / "dropped", DropEverySecond, build=build_vllm_trainer)
    assert same(dropped, run(tmp_path / "removed", cls=WithoutEverySecond, build=build_vllm_trainer))
    assert not same(dropped, stock)


# -- the table of layers


def test_the_default_pair_has_no_layer_on_one_side_only(finished, capsys):
    engine = finished.vllm_generation
    assert engine.layer_table.one_sided == []
    lines = str(engine.layer_table).splitlines()
    assert "     2 model.layers.self_attn.qkv_proj: rowwise, FP32 scales | Fp8PtpcOnlineLinearMethod" in lines
    assert "     1 lm_head: high precision | high precision" in lines


def test_what_the_trainer_excludes_the_engine_ignores(tmp_path):
    trainer = build_vllm_trainer(tmp_path, fp8_exclude_modules=["layers.1.mlp.down_proj", "layers.0.self_attn.?_proj"])
    rows = {name: (trainer, engine) for name, trainer, engine in trainer.vllm_generation.layer_table.rows}
    assert rows["model.layers.1.mlp.down_proj"] == (None, None)
    assert rows["model.layers.0.self_attn.qkv_proj"] == rows["model.layers.0.self_attn.o_proj"] == (None, None)
    assert None not in rows["model.layers.0.mlp.down_proj"]
    trainer.train()


def test_half_a_fused_layer_cannot_be_excluded(tmp_path):
    with pytest.raises(
        ValueError, match=r"q_proj trains in high precision \(excluded by the user\) and k_proj, v_proj"
    ):
        build_vllm_trainer(tmp_path, fp8_exclude_modules=["q_proj"])


def test_a_layer_only_the_user_ignores_in_the_engine_is_told(tmp_path, caplog):
    kwargs = {**ENGINE_KWARGS, "quantization_config": {"ignore": ["model.layers.0.mlp.down_proj"]}}
    trainer = build_vllm_trainer(tmp_path, vllm_engine_kwargs=kwargs)
    assert trainer.vllm_generation.layer_table.one_sided == ["model.layers.0.mlp.down_proj"]
    assert "1 layers are quantised on one side only (model.layers.0.mlp.down_proj)" in caplog.text


def test_a_quantisation_that_quantises_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'int8_per_channel_weight_only' quantises no layer of this model"):
        build_vllm_trainer(tmp_path, vllm_quantization="int8_per_channel_weight_only")


# -- the check of a weight sync


def test_trainer_and_engine_are_compared_after_every_sync(finished):
    assert len(logged(finished, "rollout/sync_logp_diff")) == 2
    assert 0 < logged(finished, "rollout/sync_logp_diff")[0] < 0.1


def test_weights_that_did_not_arrive_stop_the_run(tmp_path, monkeypatch):
    trainer = build_vllm_trainer(tmp_path, vllm_sync_check_max_ratio=3.0)
    engine = trainer.vllm_generation
    engine.sync_weights()
    original = type(engine)._iter_named_params
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    swapped = {"model.layers.0.self_attn.o_proj.weight": "model.layers.1.self_attn.o_proj.weight"}
    swapped |= {other: name for name, other in swapped.items()}
    monkeypatch.setattr(
        type(engine), "_iter_named_params", lambda self: ((swapped.get(n, n), p) for n, p in original(self))
    )
    with pytest.raises(RuntimeError, match="After weight sync 2 trainer and engine differ by .* times the .* raise"):
        engine.sync_weights()
    with pytest.raises(RuntimeError, match="start the run again"):
        engine.generate([[3, 4]], None, 1)


def test_the_check_of_a_sync_takes_no_random_numbers(finished):
    state = torch.get_rng_state()
    finished.vllm_generation.sync_weights()
    assert torch.equal(torch.get_rng_state(), state)


# -- KV cache in FP8


@pytest.fixture
def fp8_cache(tmp_path):
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX")
    return build_vllm_trainer(tmp_path, vllm_kv_cache_dtype="fp8", max_steps=4)


def test_an_fp8_cache_rolls_out_and_its_scales_are_checked(fp8_cache, monkeypatch):
    engine = fp8_cache.vllm_generation
    assert engine.llm.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    fp8_cache.train()
    assert logged(fp8_cache, "mismatch/unscored") == [0.0]

    def zero(model):
        model.model.layers[1].self_attn.attn._k_scale.zero_()

    reload_weights = _upstream.reload_weights

    def reload_and_lose_a_scale(worker, weights):
        reload_weights(worker, weights)
        zero(worker.model_runner.model)

    monkeypatch.setattr(_upstream, "reload_weights", reload_and_lose_a_scale)
    with pytest.raises(RuntimeError, match=r"scale model.layers.1.self_attn.attn._k_scale is \[0.0\]"):
        engine.sync_weights()


def test_adapters_train_in_front_of_an_fp8_engine(tmp_path):
    from peft import LoraConfig

    trainer = build_vllm_trainer(tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear"), max_steps=4)
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert base
    assert all(torch.equal(after[name], value) for name, value in base.items())
    assert logged(trainer, "mismatch/ess")[0] > 0.9


def test_after_a_resume_the_engine_has_the_checkpoints_weights(tmp_path):
    settings = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4, "calibration_interval": 1}
    build_vllm_trainer(tmp_path, max_steps=4, **settings).train()
    again = build_vllm_trainer(tmp_path, max_steps=8, **settings)
    untrained = score(again.vllm_generation.llm)
    again.train(resume_from_checkpoint=True)
    assert (score(again.vllm_generation.llm) - untrained).abs().mean() > 0.3
    assert logged(again, "mismatch/k3_kl")[-1] < 0.02
    assert logged(again, "rollout/sync_logp_diff")[-1] < 0.1
