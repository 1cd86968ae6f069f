"""The canary's floor and its jump, with an engine that is off by a known amount; the real one is in test_vllm_grpo."""

import pytest
import torch
from accelerate import Accelerator
from builders import build_model, build_tokenizer

from trl_fp8.rollout.sync_check import LARGEST_FLOOR, NUM_TOKENS, Canary, plain_tokens


MODEL = build_model()
VOCAB_SIZE = MODEL.config.vocab_size


def build_canary(tokenizer=None, vocab_size=VOCAB_SIZE, interval=1, max_length=64) -> Canary:
    return Canary(tokenizer or build_tokenizer(), vocab_size, interval, 5.0, max_length)


def off_by(nats):
    def score(token_ids):
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logps = MODEL(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        return [float(row[token]) - nats for row, token in zip(logps, token_ids[1:], strict=True)]

    return score


def check(canary, nats):
    return canary.check(MODEL, off_by(nats), Accelerator(cpu=True))


def test_the_first_difference_is_the_floor_and_five_of_it_a_jump():
    canary = build_canary()
    assert check(canary, 0.1)["rollout/canary_floor"] == pytest.approx(0.1, abs=1e-4)
    assert check(canary, 0.49)["rollout/canary"] == pytest.approx(0.49, abs=1e-4)
    with pytest.raises(RuntimeError, match=r"After weight sync 3 .* differ by 0.51 .* times the 0.1 of"):
        check(canary, 0.51)


def test_an_engine_with_another_model_is_no_floor(caplog):
    assert check(build_canary(), 2.4)["rollout/canary_floor"] == LARGEST_FLOOR
    assert "the engine may run another model" in caplog.text
    with pytest.raises(RuntimeError, match="After weight sync 1 .* differ by 2.6 .*another model"):
        check(build_canary(), 2.6)


def test_an_engine_without_numbers_stops_the_run():
    with pytest.raises(RuntimeError, match="After weight sync 1 trainer and engine differ by inf"):
        check(build_canary(), float("nan"))


def test_a_tokenizer_larger_than_the_model_gives_tokens_the_model_has():
    tokens = plain_tokens(build_tokenizer(), NUM_TOKENS, vocab_size=7)
    assert len(tokens) == NUM_TOKENS
    assert max(tokens) < 7


@pytest.mark.parametrize("settings", [{"max_length": 1}, {"max_length": 2}, {"vocab_size": 2}])
def test_where_no_prompt_can_be_scored_the_canary_is_off(caplog, settings):
    """The first two tokens of the vocabulary are special."""
    canary = build_canary(**settings)
    assert "The canary after a weight sync is off" in caplog.text
    assert check(canary, 9.0) == {}


def test_an_interval_of_none_asks_nothing():
    assert check(build_canary(interval=0), 9.0) == {}
    canary = build_canary(interval=2)
    assert check(canary, 0.1)
    assert check(canary, 9.0) == {}
