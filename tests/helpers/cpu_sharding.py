"""Run a script on CPU processes that shard as GPUs do: `cpu_sharding.py script.py [arguments]`.

accelerate 1.15 starts FSDP on the device types of its list only, and CPUs are not in it; transformers 5.24 asks for
`use_cpu` before it allows BF16 without a GPU, and accelerate then never looks at DeepSpeed. What is missing is one
answer: that two gloo processes are a distributed world whose device happens to be the CPU. Everything else, the
sharding first of all, is what a GPU run executes. For tests only.
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import training_args


def pretend() -> None:
    """Make accelerate treat this world of CPU processes as one of accelerators."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_USE_CPU"] = "false"
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    training_args.is_torch_bf16_gpu_available = lambda: True


if __name__ == "__main__":
    pretend()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
