"""Every accelerate file is parsed, keeps accelerate's FP8 off, and starts its processes with what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file


FOLDER = Path(__file__).parents[1] / "configs" / "accelerate"
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = [path.stem for path in FILES]


def test_all_files_are_there():
    assert set(NAMES) == {
        *("cpu", "single_gpu", "ddp", "fsdp2", "fsdp2_multinode", "deepspeed_zero2", "deepspeed_zero3"),
        *("cpu_2proc_ddp", "cpu_2proc_fsdp2", "cpu_2proc_zero2", "cpu_2proc_zero3"),
    }


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_accelerate_parses_it_and_its_own_fp8_is_off(path):
    text = path.read_text()
    header = text.splitlines()[0]
    assert header.startswith("# ")
    assert "accelerate 1.15" in header
    assert load_config_from_file(str(path)).mixed_precision == "no"
    settings = yaml.safe_load(text)
    assert "fp8_config" not in settings
    kinds = {"fsdp": "FSDP", "zero": "DEEPSPEED", "ddp": "MULTI_GPU"}
    expected = next((kind for part, kind in kinds.items() if part in path.stem), "NO")
    assert settings["distributed_type"] == expected
    if "zero3" in path.stem:
        assert settings["deepspeed_config"]["zero3_save_16bit_model"] is True  # or save_model has no weights to save
    if "fsdp" in path.stem:
        assert settings["fsdp_config"]["fsdp_version"] == 2
        assert settings["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if "num_processes: 1\n" not in path.read_text()], ids=lambda p: p.stem
)
def test_it_starts_two_processes_with_its_strategy(path, tmp_path):
    script = tmp_path / "say.py"
    script.write_text(
        "import json, os, sys; from pathlib import Path; "
        "Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(dict(os.environ)))"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), "--num_processes", "2"]
    done = subprocess.run(
        [*command, "--num_machines", "1", "--main_process_port", "0", str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in ("0", "1"):
        seen = json.loads((tmp_path / rank).read_text())
        assert seen["WORLD_SIZE"] == "2"
        assert seen["ACCELERATE_MIXED_PRECISION"] == "no"
        assert (seen.get("ACCELERATE_USE_FSDP") == "true") == ("fsdp2" in path.stem)
        assert seen.get("FSDP_VERSION") == ("2" if "fsdp2" in path.stem else None)
        stage = next((stage for stage in ("2", "3") if f"zero{stage}" in path.stem), None)
        assert seen.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == stage


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_example_trains_and_saves_on_two_cpu_processes(strategy, tmp_path):
    """The commands of docs/distributed.md, with the embedded task, an adapter and a recalibration."""
    root = Path(__file__).parents[1]
    config = root / "configs" / "accelerate" / f"cpu_2proc_{strategy}.yaml"
    script = [str(root / "examples" / "grpo_fp8.py")]
    if strategy != "ddp":
        script.insert(0, str(root / "tests" / "helpers" / "cpu_sharding.py"))
    settings = "--max_steps 4 --calibration_interval 1 --save_steps 4 --use_peft --report_to none".split()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [*command, "--main_process_port", "0", *script, *settings, "--output_dir", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    named = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}[strategy]
    assert f"2 processes ({named})" in done.stdout
    assert "1 recalibration;" in done.stdout
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
