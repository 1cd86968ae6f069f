"""Policies that must change nothing, or exactly one thing, and short runs to compare bit for bit.

As a script: one rank of two, `seam.py FOLDER`; writes what it found to `FOLDER/rank<r>.pt`.
"""

import os
import sys
from pathlib import Path

import torch
from builders import build_trainer

from trl_fp8 import ClippingPolicy, FP8GRPOTrainer


class Ones(ClippingPolicy):
    def token_weights(self, host, batch):
        return torch.ones_like(batch.log_probs)


class BoundsInForce(ClippingPolicy):
    def micro_batch_bounds(self, host, batch):
        return host.clip_bounds


class DropEverySecond(ClippingPolicy):
    def token_weights(self, host, batch):
        return every_second(batch.mask).float()


def every_second(mask):
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[:, ::2] = True
    return kept


class WithoutEverySecond(FP8GRPOTrainer):
    """What [`DropEverySecond`] must come to: an advantage of 0 leaves the numerator, and no denominator."""

    def _compute_loss(self, model, inputs):
        advantages = inputs["advantages"].unsqueeze(1) * every_second(inputs["completion_mask"])
        return super()._compute_loss(model, {**inputs, "advantages": advantages})


SETTINGS = {
    "clip_policy": "fixed",
    "steps_per_generation": 4,
    "learning_rate": 5e-3,
    "epsilon": 0.05,
    "max_steps": 8,
}


def run(folder, policy=None, cls=FP8GRPOTrainer, build=build_trainer, **settings):
    """Weights after a short run, and what TRL logged of its losses."""
    trainer = build(folder, cls=cls, **{**SETTINGS, **settings})
    if policy is not None:
        trainer.add_callback(policy())
    trainer.train()
    keys = ("loss", "grad_norm", "reward", "entropy")
    log = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
    clipped = [entry["clip_count/lower"] for entry in trainer.state.log_history if "clip_count/lower" in entry]
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {"weights": weights, "log": log, "clipped": sum(clipped), "bounds": trainer.clip_bounds}


def same(one, other) -> bool:
    """Whether two runs agree bit for bit."""
    assert one["weights"].keys() == other["weights"].keys()
    assert len(one["log"]) > 4
    weights = all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    return weights and one["log"] == other["log"] and one["bounds"] == other["bounds"]


def main(folder: Path) -> None:
    stock = run(folder / "stock")
    dropped = run(folder / "dropped", DropEverySecond)
    found = {
        "clipped": stock["clipped"],
        "ones": same(stock, run(folder / "ones", Ones)),
        "bounds": same(stock, run(folder / "bounds", BoundsInForce)),
        "drop": same(dropped, run(folder / "removed", cls=WithoutEverySecond)),
        "drop_acts": not same(dropped, stock),
    }
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
