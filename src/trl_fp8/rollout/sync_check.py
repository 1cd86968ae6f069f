"""After a weight sync a fixed prompt is scored on both sides, and too large a difference stops the run.

A sync that loaded the wrong weights, or a layer twice, or none, raises no error anywhere; the log-probs show it at
once. What is normal depends on model and precision, so the difference after the first sync is the measure.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from . import _upstream


logger = logging.getLogger(__name__)

NUM_TOKENS = 32
# The measure lies between these (nats). Below the smallest a difference is BF16 rounding; the largest is twice the
# mismatch of the worst pair in docs/numerics.md, and more at the first sync is a fault and not a measure
SMALLEST_FIRST, LARGEST_FIRST = 0.02, 0.5


def plain_tokens(tokenizer: Any, num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids from all over the vocabulary, the same every time: a text might hold what a vocabulary cannot spell.

    Special and added tokens are left out, since some stand for images. Empty if nothing else is left.
    """
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    plain = [token for token in range(min(len(tokenizer), vocab_size)) if token not in special]
    return [plain[7919 * i % len(plain)] for i in range(num_tokens)] if plain else []


class SyncCheck:
    """Compares trainer and engine on one prompt.

    Args:
        tokenizer: of the policy.
        vocab_size: of the policy; a tokenizer may know more tokens than the model, and fewer.
        interval: syncs between two comparisons; 0 compares never.
        max_ratio: largest difference, in multiples of the first.
        max_length: longest prompt the engine takes, in tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, interval: int, max_ratio: float, max_length: int):
        self.token_ids = plain_tokens(tokenizer, min(NUM_TOKENS, max_length - 1), vocab_size)
        if interval and len(self.token_ids) < 2:
            logger.warning(
                f"vllm_sync_check_interval={interval} has no effect: a prompt of two plain tokens does not fit an "
                f"engine of {max_length} tokens, or the tokenizer has none, so there is nothing to score. Weight "
                "syncs are not checked; raise vllm_max_model_length to have them checked."
            )
            interval = 0
        self.interval, self.max_ratio = interval, max_ratio
        self.first: float | None = None
        self._num_syncs = 0

    def logp_difference(self, model: Any, score: Callable[[list[int]], list[float]], accelerator: Any) -> float:
        """Mean |log pi_trainer - log pi_engine| over the tokens after the first, nats, the largest of all ranks.

        Args:
            model: of the trainer.
            score: gives the engine's log-probs of the tokens of a prompt after the first, nats.
            accelerator: of the trainer.
        """
        engine = torch.tensor(score(self.token_ids), device=accelerator.device)
        ids = torch.tensor([self.token_ids], device=accelerator.device)
        mask = torch.ones_like(ids)
        with torch.no_grad(), _upstream.fused_head(model), accelerator.autocast():
            trainer = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs[0]
        difference = (trainer.float() - engine).abs().mean()
        # A NaN is the worst difference there is, and a maximum would drop it
        return torch.nan_to_num(accelerator.gather(difference), nan=float("inf")).max().item()

    def after_sync(self, model: Any, score: Callable[[list[int]], list[float]], accelerator: Any) -> dict[str, float]:
        """Compare if it is this sync's turn; arguments as in [`logp_difference`].

        Returns:
            The metrics of this sync, nats; none between two comparisons.

        Raises:
            RuntimeError: the difference is more than `max_ratio` times the first, or not a number.
        """
        self._num_syncs += 1
        if self.interval == 0 or (self._num_syncs - 1) % self.interval:
            return {}
        difference = self.logp_difference(model, score, accelerator)
        if self.first is None:
            self.first = min(max(difference, SMALLEST_FIRST), LARGEST_FIRST)
            if difference > LARGEST_FIRST:
                logger.warning(
                    f"At the first weight sync trainer and engine differ by {difference:.3g} nats a token on a fixed "
                    f"prompt, where FP8 makes less than {LARGEST_FIRST:g}: the engine may run another model than the "
                    "policy (another checkpoint, configuration or head). Compare with vllm_quantization='none'."
                )
        if not difference <= self.max_ratio * self.first or difference == float("inf"):
            raise RuntimeError(
                f"After weight sync {self._num_syncs} trainer and engine differ by {difference:.3g} nats a token on "
                f"a fixed prompt, more than vllm_sync_check_max_ratio={self.max_ratio:g} times the {self.first:.3g} "
                f"of the first sync (at most {LARGEST_FIRST:g}). The engine does not hold the trainer's weights, it "
                "runs another model, or one side has become numerically unstable. Look at the versions of vLLM and "
                "TRL, at what changes the model (vllm_engine_kwargs, modules of the policy), and at NaN in the "
                "weights; compare with vllm_quantization='none'. If the difference is real, raise "
                "vllm_sync_check_max_ratio, or set vllm_sync_check_interval=0."
            )
        return {"rollout/sync_logp_diff": difference, "rollout/sync_logp_diff_first": self.first}
