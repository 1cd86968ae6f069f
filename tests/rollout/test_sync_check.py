"""What the check of a weight sync lets pass, with an engine that is off by a known amount.

A real one is in `test_vllm_grpo.py`.
"""

import pytest
import torch
from accelerate import Accelerator
from builders import build_model, build_tokenizer

from trl_fp8.rollout.sync_check import LARGEST_FIRST, NUM_TOKENS, SyncCheck, plain_tokens


MODEL = build_model()
VOCAB_SIZE = MODEL.config.vocab_size


def build_check(tokenizer=None, vocab_size=VOCAB_SIZE, interval=1, max_length=64) -> SyncCheck:
    return SyncCheck(tokenizer or build_tokenizer(), vocab_size, interval, 5.0, max_length)


def off_by(nats):
    def score(token_ids):
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logps = MODEL(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        return [float(row[token]) - nats for row, token in zip(logps, token_ids[1:], strict=True)]

    return score


def after_sync(check, nats):
    return check.after_sync(MODEL, off_by(nats), Accelerator(cpu=True))


def test_the_first_difference_is_the_measure_and_five_of_it_the_limit():
    check = build_check()
    assert after_sync(check, 0.1)["rollout/sync_logp_diff_first"] == pytest.approx(0.1, abs=1e-4)
    assert after_sync(check, 0.49)["rollout/sync_logp_diff"] == pytest.approx(0.49, abs=1e-4)
    with pytest.raises(RuntimeError, match=r"After weight sync 3 .* differ by 0.51 .* times the 0.1 of"):
        after_sync(check, 0.51)


def test_an_engine_with_another_model_is_not_a_measure(caplog):
    assert after_sync(build_check(), 2.4)["rollout/sync_logp_diff_first"] == LARGEST_FIRST
    assert "the engine may run another model" in caplog.text
    with pytest.raises(RuntimeError, match="After weight sync 1 .* differ by 2.6 .*another model"):
        after_sync(build_check(), 2.6)


def test_an_engine_without_numbers_stops_the_run():
    with pytest.raises(RuntimeError, match="After weight sync 1 trainer and engine differ by inf"):
        after_sync(build_check(), float("nan"))


def test_a_tokenizer_larger_than_the_model_gives_tokens_the_model_has():
    tokens = plain_tokens(build_tokenizer(), NUM_TOKENS, vocab_size=7)
    assert len(tokens) == NUM_TOKENS
    assert max(tokens) < 7


@pytest.mark.parametrize("settings", [{"max_length": 1}, {"max_length": 2}, {"vocab_size": 2}])
def test_where_no_prompt_can_be_scored_the_check_is_off(caplog, settings):
    """The first two tokens of the vocabulary are special."""
    check = build_check(**settings)
    assert "vllm_sync_check_interval=1 has no effect" in caplog.text
    assert after_sync(check, 9.0) == {}


def test_an_interval_of_none_asks_nothing():
    assert after_sync(build_check(interval=0), 9.0) == {}
    check = build_check(interval=2)
    assert after_sync(check, 0.1)
    assert after_sync(check, 9.0) == {}
