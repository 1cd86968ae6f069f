"""Scripts that need hardware go through their steps here."""

import json
import os
import subprocess
import sys
from pathlib import Path


SCRIPTS = Path(__file__).parents[1] / "scripts"
PACKAGE = Path(__file__).parents[1] / "src" / "trl_fp8"


def run(*arguments):
    return subprocess.run(
        [str(SCRIPTS / "gpu_check.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_gpu_check_goes_through_its_steps_on_a_cpu():
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert {row["recipe"] for row in report["layers"]} == {"tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"}
    assert {row["recipe"] for row in report["layers"] if row["scale_rounding"] != "none"} == {"rowwise", "blockwise"}
    assert len(report["torchao_scales"]) == 6
    assert all(entry["emulated"] and entry["bounds"] != [0.6, 1.8] for entry in report["training"])


def test_gpu_check_says_what_is_missing():
    assert "No CUDA GPU is visible" in run().stdout
    done = run("--wheels", "/nowhere")
    assert done.returncode == 2
    assert "no such folder" in done.stderr


def test_gpu_check_names_a_folder_without_wheels(tmp_path):
    done = run("--wheels", str(tmp_path))
    assert done.returncode == 2
    assert "no wheel in it" in done.stderr


def test_structure_counts_what_is_there():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "structure.py"), str(PACKAGE)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"files: {len(list(PACKAGE.rglob('*.py')))} in 5 folders")
    assert lines[1].startswith(f"lines: {sum(len(p.read_text().splitlines()) for p in PACKAGE.rglob('*.py'))}, ")
    assert "_step" in lines[-1]
