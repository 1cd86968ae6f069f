"""How an engine of either kind is started, and what its weight sync refuses, without vLLM."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from builders import build_model, build_moe, build_tokenizer
from peft import LoraConfig, get_peft_model

from trl_fp8 import FP8GRPOConfig
from trl_fp8.diagnostics import Mean
from trl_fp8.rollout import _upstream
from trl_fp8.rollout.engine import SyncedEngine


class FakeEngine(SyncedEngine):
    """Keeps what it is sent, and scores as the trainer does but for `off_by` nats."""

    max_length = 64
    off_by = 0.0

    def check_model(self):
        self.events = ["check"]

    @contextlib.contextmanager
    def starting(self):
        self.events.append("before")
        yield
        self.events.append("after")

    def send(self, weights):
        self.sent = dict(weights)

    def score(self, token_ids):
        with torch.no_grad():
            logps = self.model(input_ids=torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
        return [float(row[token]) - self.off_by for row, token in zip(logps, token_ids[1:], strict=True)]


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(_upstream.VLLMGeneration, "_init_vllm", lambda self: self.events.append("TRL"))

    def build(model, *, records=None, enable_sleep_mode=False, **settings):
        args = FP8GRPOConfig(str(tmp_path), use_cpu=True, report_to=[], use_vllm=True, **settings)
        return FakeEngine(
            model,
            Accelerator(cpu=True),
            build_tokenizer(),
            settings=args,
            before_start=lambda: None,
            record=[].append if records is None else records.append,
            enable_sleep_mode=enable_sleep_mode,
        )

    return build


def test_every_engine_is_checked_started_and_checked_again(start):
    engine = start(build_model())
    assert engine.events == ["check", "before", "TRL", "after"]
    assert engine.sync_check.interval == 1
    assert engine.sync_check.max_ratio == 5.0


@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings=True.")  # PEFT says it, too, as a warning
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (build_moe, "use_vllm=True on a CPU with fused experts"),
        (
            lambda: get_peft_model(build_model(), LoraConfig(target_modules=["lm_head"])),
            "The adapter on lm_head changes one of two layers",
        ),
    ],
    ids=["experts", "tied adapter"],
)
def test_what_no_engine_can_take_is_refused_before_it_starts(build, message, start, monkeypatch):
    monkeypatch.setattr(FakeEngine, "check_model", lambda self: pytest.fail("the engine is looked at"))
    with pytest.raises(ValueError, match=message):
        start(build())


def test_a_sleeping_engine_is_not_asked_for_scores(start, caplog):
    engine = start(build_model(), enable_sleep_mode=True)
    assert engine.sync_check.interval == 0
    assert "vllm_sync_check_interval=1 with vllm_enable_sleep_mode=True" in caplog.text
    assert start(build_model()).sync_check.interval == 1


def test_a_sync_sends_copies_of_all_weights_and_is_measured(start):
    records, model = [], build_model()
    engine = start(model, records=records)
    engine.off_by = 0.1
    engine.sync_weights()
    parameters = dict(model.named_parameters())
    assert engine.sent.keys() == parameters.keys()
    for name, tensor in engine.sent.items():
        assert torch.equal(tensor, parameters[name])
        assert tensor.data_ptr() != parameters[name].data_ptr()
    (metrics,) = records
    assert metrics["rollout/sync_bytes"] == Mean(sum(p.numel() * 4 for p in parameters.values()), 1.0)
    assert metrics["rollout/sync_time"].numerator > 0
    assert metrics["rollout/sync_logp_diff"] == pytest.approx(0.1, abs=1e-4)
    assert metrics["rollout/sync_logp_diff_first"] == pytest.approx(0.1, abs=1e-4)


def test_an_engine_that_differs_after_a_sync_generates_no_more(start):
    engine = start(build_model())
    engine.sync_weights()
    engine.off_by = 0.11  # the smallest measure is 0.02
    with pytest.raises(RuntimeError, match="After weight sync 2 .* vllm_sync_check_max_ratio=5 times the 0.02"):
        engine.sync_weights()
    for use in (engine.sync_weights, lambda: engine.generate([[3, 4]], None, 1)):
        with pytest.raises(RuntimeError, match=r"failed half-way \(RuntimeError: After .*last checkpoint"):
            use()


def test_a_parameter_that_came_after_the_first_sync_is_refused(start):
    model = build_model()
    engine = start(model)
    engine.sync_weights()
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"new: \['extra'\].*before the trainer is built"):
        engine.sync_weights()
    del model.extra
    engine.sync_weights()


def test_a_parameter_lost_before_the_first_sync_is_refused(start):
    model = build_model()
    engine = start(model)
    del model.model.layers[1].self_attn.k_proj
    with pytest.raises(ValueError, match="first weight sync lacks model.layers.1.self_attn.k_proj.weight"):
        engine.sync_weights()
