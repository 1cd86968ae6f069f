"""vLLM in a process of its own, on other GPUs than the trainer: checked before it is used, watched while it is.

    before the policy is loaded   settings of the server  =  settings of the run?     server_checks.py
    before the first generation   model, layers           =  the policy's?
    each sync                     weights -> server, which re-quantises them; prefix cache; log-probs of both sides
    each generation               still the process that got the weights?

Weights travel over NCCL through TRL's client, all in one update: the server brackets an update with the layerwise
reload that a colocated engine goes through (`NCCLWeightTransferEngine.start_weight_update` and `finish_weight_update`,
vLLM 0.31), and so quantises whole layers, as at its start. Needs CUDA, not run here. TRL's `update_named_param`, one
tensor at a time outside `weight_update()`, opens a bracket per tensor and leaves garbage in fused layers.

A trainer without CUDA writes the weights to a directory that the server reads (`reload_weights` from a path, the same
bracket). That is how this module is tested on a CPU; server and trainer must see one file system.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import requests
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import Tensor

from . import _upstream, same_model, server_checks
from .engine import SyncedEngine


# Bytes a trainer without CUDA holds a second time while it writes the weights
_SHARD_BYTES = 2**30
_FOLDER_PREFIX = "rollout-weights-"


class ServerEngine(SyncedEngine):
    """TRL's client of a vLLM server that quantises, with the server's settings checked and its health watched."""

    # -- construction ------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        settings = self._settings
        is_main, path = self.accelerator.is_main_process, str(self.model.name_or_path)
        self._served = self._from_main(server_checks.read_server_configuration(settings, path) if is_main else None)
        server_checks.check_settings(settings, self._served)
        server_checks.check_model(settings, self._served, self.model)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        server_checks.check_layers(self._settings, self._served, self._report)
        client = partial(CheckpointClient, self._settings.output_dir or ".")
        on_cuda = self.accelerator.device.type == "cuda"
        with contextlib.nullcontext() if on_cuda else _upstream.in_place_of_trls("VLLMClient", client):
            yield
        if self.accelerator.is_main_process:  # other processes would give the main one up after as long
            _upstream.limit_answers(self.vllm_client, self._settings.ddp_timeout)

    @property
    def max_length(self) -> int:
        return self._served["model_config"]["max_model_len"]

    def _from_main(self, value: Any) -> Any:
        values = [value]
        broadcast_object_list(values, from_process=0)
        return values[0]

    # -- weights -----------------------------------------------------------------------------------------------------

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if not self.accelerator.is_main_process:
            for _ in weights:  # take part in the gathering
                pass
            return
        metadata = [(name, *described) for name, described in self._stream_metadata.items()]
        if self.accelerator.device.type == "cpu":  # there vLLM packs a tied head when it meets it by name
            names = {name: group for group in same_model.tied_parameters(self.model) for name in group}
            weights = ((alias, tensor.clone()) for name, tensor in weights for alias in names.get(name, [name]))
        with self._watching("a weight sync"):
            self.vllm_client.update_named_params(metadata, weights)
            self.vllm_client.reset_prefix_cache()

    def score(self, token_ids: list[int]) -> list[float]:
        scores: list[float] | None = None
        if self.accelerator.is_main_process:
            with self._watching("the check of a weight sync"):
                answer = self.vllm_client.get_sequence_logprobs([token_ids], [1], top_logprobs=0)
            # JSON has no NaN
            scores = [float("nan") if logprob is None else logprob for (logprob,) in answer["actual_logprobs"][0]]
        return self._from_main(scores)

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        with self._watching("generation"):
            output = super().generate(*args, **kwargs)
            if self.accelerator.is_main_process:
                self._refuse_restarted()
        return output

    # -- the server's health -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching(self, occupation: str) -> Iterator[None]:
        try:
            yield
        except requests.RequestException as error:
            raise RuntimeError(
                f"The vLLM server at {server_checks.server_url(self._settings)} was lost during {occupation} "
                f"({error}), so there is nothing to train on. Look at its log, start it again as before, and resume "
                "the run from its last checkpoint with trainer.train(resume_from_checkpoint=True). If it was only "
                f"slow, raise ddp_timeout={self._settings.ddp_timeout}, the longest wait for one answer in seconds."
            ) from error

    def _refuse_restarted(self) -> None:
        """TRL's client repeats what fails for a minute; a server restarted meanwhile has the weights of its start."""
        if self.vllm_client.get_server_info()["instance_id"] != self._served["instance_id"]:
            raise RuntimeError(
                f"The vLLM server at {server_checks.server_url(self._settings)} is not the process that this run "
                "sent its weights to: it was restarted, and generates with the weights it started from. Resume the "
                "run from its last checkpoint with trainer.train(resume_from_checkpoint=True)."
            )


class CheckpointClient(_upstream.VLLMClient):
    """TRL's client where there is no NCCL: weights go through a directory that the server reads.

    Args:
        folder: where to write them, and delete them again.
        *args, **kwargs: of TRL's client.
    """

    def __init__(self, folder: str | Path, *args: Any, **kwargs: Any):
        self._folder = Path(folder).resolve()
        super().__init__(*args, **kwargs)

    def init_communicator(self, device: Any = 0) -> None:
        """Nothing to open."""

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Write the weights, have the server load and quantise them, and delete them.

        Raises:
            RuntimeError: the server cannot load them.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        delete_weights_of_dead_runs(self._folder)
        with tempfile.TemporaryDirectory(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=self._folder) as path:
            write_shards(path, named_params, _SHARD_BYTES)
            request = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            try:
                response = self.session.post(f"{self.base_url}/collective_rpc", json=request)
                failure = "" if response.status_code == 200 else f"{response.status_code}, {response.text}"
            except requests.exceptions.RetryError as error:  # it answers, with 500 each time
                failure = str(error)
        if failure:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} could not load the weights from {self._folder} ({failure}). "
                "Without CUDA they travel through output_dir: put it on a file system that trainer and server both "
                "see under this path, and look at the server's log."
            )


def delete_weights_of_dead_runs(folder: Path) -> None:
    """Delete the weights that runs on this machine have left in `folder` when they were killed."""
    for left in folder.glob(f"{_FOLDER_PREFIX}*-*"):
        pid = left.name.removeprefix(_FOLDER_PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc").is_dir():
            shutil.rmtree(left, ignore_errors=True)


def write_shards(folder: str, tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write `tensors` as safetensors files of `max_bytes` and at most one tensor more, holding one file at a time."""
    shard: dict[str, Tensor] = {}
    num_bytes = num_shards = 0
    for name, tensor in tensors:
        shard[name] = tensor.cpu().contiguous()
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes >= max_bytes:
            save_file(shard, Path(folder) / f"model-{num_shards:05}.safetensors")
            shard, num_bytes, num_shards = {}, 0, num_shards + 1
    if shard:
        save_file(shard, Path(folder) / f"model-{num_shards:05}.safetensors")
