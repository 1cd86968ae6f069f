"""Adapters on an FP8 base: what is in which precision, and that the shadow pass is the unconverted PEFT model's."""

import copy

import pytest
import torch
from builders import RECIPES, build_model, build_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig

from trl_fp8.float8 import convert_model, high_precision
from trl_fp8.float8.linear import SwitchableLinear
from trl_fp8.reference import without_adapter


CALIBRATED = {"calibration_interval": 1, "max_steps": 4, "learning_rate": 5e-3}


def lora(**settings):
    return LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, **settings)


def logits(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch).logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_base_is_fp8_adapters_are_not_and_a_zero_b_gives_no_nan(recipe, batch):
    model = get_peft_model(build_model(), lora())
    twin = copy.deepcopy(model)
    report = convert_model(model, recipe)
    assert len(report.converted) == 14
    assert all(name.endswith("base_layer") for name in report.converted)
    adapters = [m for name, m in model.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))]
    assert len(adapters) == 28
    assert not any(isinstance(m, SwitchableLinear) for m in adapters)
    outputs = []
    hook = adapters[0].register_forward_hook(lambda module, inputs, output: outputs.append(output.dtype))
    output = logits(model, batch)
    hook.remove()
    assert outputs == [torch.bfloat16]
    output.float().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert any(grad.abs().sum() > 0 for name, grad in grads.items() if "lora_B" in name)
    assert all(p.grad is None for name, p in model.named_parameters() if "base_layer" in name)
    with torch.no_grad(), high_precision(model):
        assert torch.equal(logits(model, batch), logits(twin, batch))


def test_a_frozen_base_gives_the_gradients_of_a_trained_one(batch):
    """The gradient of a frozen weight is cut short, and nothing else may change by it."""
    grads = []
    for frozen in (True, False):
        model = get_peft_model(build_model(), lora(init_lora_weights=False))
        convert_model(model, "rowwise")
        model.requires_grad_(True)
        for name, parameter in model.named_parameters():
            if "base_layer" in name:
                parameter.requires_grad_(not frozen)
        torch.manual_seed(0)
        logits(model, batch).float().square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if "base_layer" not in n and p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("precision", ["own", "fp8"])
def test_the_reference_without_adapter_has_the_precision_asked_for(precision, tmp_path, monkeypatch):
    trainer = build_trainer(
        tmp_path, beta=0.1, ref_model_precision=precision, trainer={"peft_config": lora()}, **CALIBRATED, bf16=False
    )
    assert trainer.ref_model is None
    kl = []
    score = trainer._generate_and_score_completions

    def spy(inputs):
        output = score(inputs)
        kl.append((output["ref_per_token_logps"] - output["old_per_token_logps"]).abs().max().item())
        return output

    monkeypatch.setattr(trainer, "_generate_and_score_completions", spy)
    trainer.train()
    # B is 0 at the start, so policy and reference are one model: only the precision tells them apart
    assert (kl[0] == 0) == (precision == "fp8")
    assert kl[0] < 0.1  # 0.0078 measured with "bf16"


@pytest.mark.parametrize("precision", ["own", "fp8"])
def test_a_reference_model_has_the_precision_asked_for(precision, tmp_path):
    build_model().save_pretrained(tmp_path / "model")
    model = build_model()
    model.config._name_or_path = str(tmp_path / "model")
    trainer = build_trainer(
        tmp_path / "run", model=model, beta=0.1, ref_model_precision=precision, **CALIBRATED, bf16=False
    )
    count = sum(isinstance(m, SwitchableLinear) for m in trainer.ref_model.modules())
    assert count == (14 if precision == "fp8" else 0)
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert (kl[0] == 0) == (precision == "fp8")
    assert all(not p.requires_grad or p.grad is None for p in trainer.ref_model.parameters())


def test_modules_to_save_are_trained_in_fp8_and_saved(tmp_path):
    peft_config = LoraConfig(r=16, target_modules=["q_proj"], modules_to_save=["down_proj"], lora_dropout=0.0)
    trainer = build_trainer(tmp_path, trainer={"peft_config": peft_config}, **CALIBRATED)
    converted = trainer.conversion_report.converted
    saved = [name for name in converted if "modules_to_save" in name]
    assert len(saved) == 2
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert any("modules_to_save" in name for name in before)
    for name, parameter in trainer.model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(build_model(), tmp_path / "adapter")
    trained = dict(trainer.model.named_parameters())
    for name, parameter in loaded.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            assert torch.equal(parameter.float(), trained[name].float()), name


def test_base_weights_keep_every_bit(tmp_path):
    trainer = build_trainer(tmp_path, trainer={"peft_config": lora()}, **CALIBRATED)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert trainer.clip_bounds != (0.6, 1.8)


def test_qlora_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quantization_config=BitsAndBytesConfig.*QLoRA"):
        build_trainer(
            tmp_path, trainer={"peft_config": lora(), "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
        )


def test_an_adapter_that_never_calls_its_layer_is_refused(tmp_path):
    from peft import HRAConfig, MissConfig

    for config in (HRAConfig(target_modules=["q_proj"]), MissConfig(target_modules=["q_proj"], init_weights="bat")):
        with pytest.raises(ValueError, match=f"{type(config).__name__} .* never calls the layer.* Use LoRA"):
            build_trainer(tmp_path, trainer={"peft_config": config})


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")  # PEFT's own
def test_prompt_tuning_has_a_reference_without_the_prompt(tmp_path):
    from peft import PromptTuningConfig, TaskType

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    trainer = build_trainer(tmp_path, beta=0.1, trainer={"peft_config": config}, **CALIBRATED, bf16=False)
    assert not without_adapter(trainer.model)
    with trainer.model.disable_adapter():
        assert without_adapter(trainer.model)
    trainer.train()
