"""kill -9 of a run with a colocated engine, and what is left of it: its checkpoints, and nothing else."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


pytest.importorskip("vllm")

from vllm_helpers import clean_environment, group_is_alive


pytestmark = pytest.mark.vllm


def run(folder, *arguments) -> tuple[int, int]:
    """Exit code of `vllm_run.py` and the port of its engine; nothing of it may be alive afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "helpers" / "vllm_run.py"), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    output, _ = process.communicate(timeout=400)
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_is_alive(process.pid)
    ports = [line.split()[1] for line in output.splitlines() if line.startswith("port ")]
    assert ports, output[-3000:]
    return process.returncode, int(ports[0])


def test_a_run_killed_in_generation_and_between_mini_batches_resumes(tmp_path):
    code, port = run(tmp_path, "generation")
    assert code == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    with socket.socket() as probe:  # the engine of the dead process holds nothing
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    code, _ = run(tmp_path, "mini-batch", "resume")
    assert code == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    code, _ = run(tmp_path, "none", "resume")
    assert code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 16
    assert result["steps"] == list(range(1, 17))
    # Every second generation batch, counted over all three processes
    assert result["recalibrated_at"] == [8, 16]
    # The engine starts from the untrained checkpoint and gets the trained weights before it generates
    assert max(result["k3"]) < 0.02
    assert max(result["sync_logp_diff"]) < 0.1
    assert result["bounds"] != [0.6, 1.8]
