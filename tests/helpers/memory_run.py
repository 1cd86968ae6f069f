"""One rank of a two-process CPU run that measures where the memory of a sharded training step goes.

Prints one line of JSON: bytes of resident memory above the idle level (weights sharded, nothing in flight) at the
peak of the forward and of the backward pass, and the bytes of the whole model. Launched by `test_memory.py`, with
`MALLOC_MMAP_THRESHOLD_` low, so that freed tensors leave the resident set at once.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from builders import build_model, build_trainer


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Largest resident memory inside the context, sampled every half millisecond."""

    def __enter__(self):
        self.bytes, self._stop = resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.is_set():
            self.bytes = max(self.bytes, resident())
            time.sleep(0.0005)

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


def main(request: dict) -> None:
    model = build_model(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64,
    )  # fmt: skip
    settings = {
        "use_cpu": os.environ.get("ACCELERATE_TORCH_DEVICE") != "cpu",
        "max_steps": 2,
        "calibration_interval": 100,
        "per_device_train_batch_size": 4,
        "max_completion_length": 2,
        "optim": "sgd",
        **request,
    }
    trainer = build_trainer(tempfile.mkdtemp(), model=model, **settings)
    seen = []
    compute_loss, accelerator = trainer.compute_loss, trainer.accelerator
    backward = accelerator.backward

    def measured_loss(*args, **kwargs):
        idle = resident()
        with Peak() as peak:
            loss = compute_loss(*args, **kwargs)
        seen.append({"forward": peak.bytes - idle, "held": resident() - idle, "idle": idle})
        return loss

    def measured_backward(loss, **kwargs):
        with Peak() as peak:
            backward(loss, **kwargs)
        seen[-1]["backward"] = peak.bytes - seen[-1].pop("idle")

    trainer.compute_loss, accelerator.backward = measured_loss, measured_backward
    whole = sum(p.numel() for p in model.parameters()) * (2 if settings.get("bf16", True) else 4)
    trainer.train()
    if accelerator.is_main_process:
        print("MEMORY " + json.dumps({"whole": whole, **seen[-1]}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    torch.manual_seed(0)
    main(json.loads(sys.argv[1]))
