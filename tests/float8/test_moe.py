"""A mixture of experts: attention trains in FP8, fused experts and routers do not, and the report says how much."""

import pytest
import torch
from builders import RECIPES, build_moe, build_trainer

from trl_fp8.float8.linear import SwitchableLinear


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mixture_of_experts_trains_and_every_part_moves(recipe, tmp_path):
    model = build_moe()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = build_trainer(
        tmp_path, model=model, fp8_recipe=recipe, calibration_interval=1, max_steps=4, learning_rate=5e-3
    )
    report = trainer.conversion_report
    assert len(report.converted) == 8
    assert {name.rsplit(".", 1)[1] for name in report.converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    # per layer and expert: gate and up of 32 x 64 each, down of 64 x 32
    assert report.num_fused_expert_parameters == 2 * 4 * (2 * 32 * 64 + 64 * 32)
    assert "49,152 parameters of fused experts stay in high precision" in str(report)
    trainer.train()
    assert trainer.clip_bounds != (0.6, 1.8)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert len(routers) == 2
    assert not any(isinstance(router, SwitchableLinear) for router in routers)


def test_routing_is_that_of_bf16_in_the_shadow_pass(batch):
    """The reference includes which experts are taken, so the shadow pass must choose them itself."""
    from copy import deepcopy

    from trl_fp8.float8 import convert_model, high_precision

    model = build_moe()
    twin = deepcopy(model)
    convert_model(model, "rowwise")
    with torch.no_grad(), high_precision(model):
        assert torch.equal(model(**batch).logits, twin(**batch).logits)
