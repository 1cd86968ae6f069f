"""Two real processes (gloo): one decision per world, and metrics that are sums over ranks and window."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trl_fp8.clipping import calibrate_bounds


SCRIPT = Path(__file__).parent / "helpers" / "ddp_run.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def pooled(ranks, batch):
    """Tokens of generation batch `batch` over micro-batches and ranks, as one row."""
    parts = [tensors for rank in ranks for tensors in rank["batches"][4 * batch : 4 * batch + 4]]
    ratio, ref_ratio, mask = (torch.cat([p[i].flatten() for p in parts]).unsqueeze(0) for i in (0, 1, 3))
    advantages = torch.cat([p[2].unsqueeze(1).expand(p[3].shape).flatten() for p in parts]).unsqueeze(0)
    return ratio, ref_ratio, advantages, mask


def test_ranks_see_different_tokens_and_take_the_decision_of_the_pooled_ones(ranks):
    assert ranks[0]["bounds"] == ranks[1]["bounds"]
    assert not torch.equal(ranks[0]["batches"][0][2], ranks[1]["batches"][0][2])
    bounds = (0.6, 1.8)
    for batch in range(2):
        decision = calibrate_bounds(*pooled(ranks, batch), bounds=bounds)
        assert not decision.degenerate
        bounds = (decision.lower, decision.upper)
        assert ranks[0]["bounds"][batch] == bounds


def test_metrics_are_sums_over_ranks_and_the_window(ranks):
    logs = [entry for entry in ranks[0]["log"] if "clip_share/lower_at_reference" in entry]
    assert len(logs) == 2
    for batch, entry in enumerate(logs):
        ratio, ref_ratio, advantages, mask = pooled(ranks, batch)
        negative = mask & (advantages < 0)
        share = (negative & (ratio.double() <= 0.8)).sum() / negative.sum()
        reference = (negative & (ref_ratio.double() <= 0.8)).sum() / negative.sum()
        assert share > 0
        assert entry["clip_share/lower_at_reference"] == pytest.approx(share.item(), rel=1e-6)
        assert entry["clip_share/lower_bf16"] == pytest.approx(reference.item(), rel=1e-6)
        error = (ratio.double() - ref_ratio.double()).abs()[mask].sum() / ref_ratio.double()[mask].sum()
        assert entry["fp8/ratio_nmae"] == pytest.approx(error.item(), rel=1e-6)
