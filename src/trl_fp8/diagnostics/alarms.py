"""When trainer and rollout engine are too far apart to go on unwatched: published thresholds and what to look at."""

from collections.abc import Mapping


_CAUSES = (
    "Look at the weight sync, the precision of both sides (vllm_quantization, fp8_recipe, the output embedding), the "
    "temperature, and sampling that is truncated."
)
# kind -> (metric, lowest and highest value that is fine, where the threshold is published)
_LIMITS = {
    "ratio_mean": ("mismatch/ratio_raw_mean", 0.5, 2.0, "verl"),
    "ess": ("mismatch/ess", 0.3, None, "verl"),
    "kl": ("mismatch/kl", -0.1, 0.1, "verl"),
    "chi2": ("mismatch/chi2_token", None, 1.0, "verl"),
    "truncated": ("mismatch/frac_truncated", None, 0.9, "huggingface/trl#5312"),
    "unscored": ("mismatch/unscored", None, 0.0, "every token should have a log-prob"),
}


def mismatch_alarms(logs: Mapping[str, float], raised: set[str]) -> list[str]:
    """Messages of the alarms that the metrics of one logging window raise and no earlier window did.

    Args:
        logs: metrics of the window.
        raised: kinds of alarm so far; gets the new ones added.
    """
    alarms = []
    for kind, (key, low, high, source) in _LIMITS.items():
        value = logs.get(key)
        if kind in raised or value is None or ((low is None or value >= low) and (high is None or value <= high)):
            continue
        limits = " and ".join(
            f"{word} {bound:g}" for word, bound in (("at least", low), ("at most", high)) if bound is not None
        )
        raised.add(kind)
        alarms.append(f"{key}={value:.4g}, and it should be {limits} ({source}). {_CAUSES} Said once per run.")
    return alarms
