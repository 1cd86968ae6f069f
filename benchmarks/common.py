"""What the benchmarks share: the embedded task of `examples/`, and two trainers taking turns step by step."""

import statistics
import sys
import threading
import time
from pathlib import Path

from transformers import TrainerCallback


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import embedded_task  # noqa: E402, F401 - after the path it is on; benchmarks take it from here


def versions() -> str:
    """Versions and threads, for the head of a table."""
    import torch
    import torchao
    import transformers
    import trl

    return (
        f"torch {torch.__version__}, torchao {torchao.__version__}, trl {trl.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} thread(s)"
    )


class Turns:
    """Lets several threads run one after the other, one optimizer step each, so that both see the same machine."""

    def __init__(self, size: int):
        self.size, self.turn, self.active = size, 0, set(range(size))
        self.condition = threading.Condition()

    def wait(self, index: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == index)

    def pass_on(self, index: int, leave: bool = False) -> None:
        with self.condition:
            if leave:
                self.active.discard(index)
            following = [i for i in [*range(index + 1, self.size), *range(index + 1)] if i in self.active]
            self.turn = following[0] if following else index
            self.condition.notify_all()


class StepTimer(TrainerCallback):
    """Seconds of each optimizer step, taking turns with other trainers."""

    def __init__(self, turns: Turns, index: int):
        self.turns, self.index, self.seconds = turns, index, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.turns.wait(self.index)
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)
        self.turns.pass_on(self.index)
        self.turns.wait(self.index)
        self.start = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self.turns.pass_on(self.index, leave=True)


def interleave(trainers: list, warm_up: int) -> list[list[float]]:
    """Train all of `trainers`, one optimizer step in turn; seconds per step of each, without the first `warm_up`."""
    turns = Turns(len(trainers))
    timers = [StepTimer(turns, index) for index in range(len(trainers))]
    threads = []
    errors: list[BaseException] = []

    def run(trainer, index):
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)
            turns.pass_on(index, leave=True)

    for index, (trainer, timer) in enumerate(zip(trainers, timers, strict=True)):
        trainer.add_callback(timer)
        threads.append(threading.Thread(target=run, args=(trainer, index)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [timer.seconds[warm_up:] for timer in timers]


def median_ratio(first: list[float], second: list[float]) -> float:
    """Median of the step-by-step ratios of two interleaved runs."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
