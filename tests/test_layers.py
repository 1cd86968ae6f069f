"""The architecture, read from the imports: few rooms, one direction, one door to private upstream names."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "src" / "trl_fp8"
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60

# module -> modules of this package it may import, and distributions outside the standard library. The pure ones know
# tensors only. `trainer` may import all
PURE = {"alarms", "clip_statistics", "clipping", "diagnostics", "metrics", "measure"}
ALLOWED = {
    "__init__": ({"callbacks", "config", "trainer"}, set()),
    "_upstream": (set(), {"torch", "torchao", "trl", "transformers", "accelerate", "peft"}),
    "_upstream_vllm": (set(), {"torch", "trl", "peft", "urllib3", "vllm"}),
    "clip_statistics": (set(), {"torch"}),
    "importance": (set(), {"torch"}),
    "clipping": ({"clip_statistics", "importance"}, {"torch"}),
    "diagnostics": (set(), {"torch"}),
    "metrics": (set(), {"torch"}),
    "alarms": (set(), set()),
    "measure": ({"clip_statistics", "clipping", "diagnostics", "metrics"}, {"torch"}),
    "switchable": (set(), {"torch"}),
    "emulation": ({"_upstream"}, {"torch"}),
    "blockwise": ({"_upstream", "emulation", "switchable"}, {"torch"}),
    "float8_matmul": ({"_upstream", "switchable"}, {"torch"}),
    "all_gather": ({"_upstream", "float8_matmul"}, {"torch", "transformers"}),
    "float8": ({"_upstream", "all_gather", "blockwise", "emulation", "float8_matmul", "switchable"}, {"torch"}),
    "config_checks": ({"clipping"}, set()),
    "pairing": (set(), set()),
    "config": ({"clipping", "config_checks", "pairing"}, {"trl"}),
    "kernels": ({"config"}, {"torch"}),
    "compiling": ({"config"}, {"torch", "torchao"}),
    "shadow": ({"_upstream", "compiling", "float8"}, {"torch", "transformers"}),
    "parity": ({"float8"}, {"torch"}),
    "architecture": ({"_upstream_vllm", "float8", "parity"}, {"torch"}),
    "canary": ({"_upstream_vllm"}, {"torch"}),
    "weights": ({"_upstream_vllm", "all_gather", "canary", "config", "float8"}, {"torch"}),
    "server_checks": ({"architecture", "config", "float8", "parity"}, {"transformers"}),
    "server": (
        {"_upstream_vllm", "architecture", "parity", "server_checks", "weights"},
        {"accelerate", "requests", "safetensors", "torch"},
    ),
    "rollout": (
        {
            "_upstream_vllm",
            "architecture",
            "config",
            "float8",
            "pairing",
            "parity",
            "server",
            "server_checks",
            "weights",
        },
        {"torch", "transformers", "vllm"},
    ),
    "strategies": ({"config"}, {"torch"}),
    "resume": (set(), {"transformers"}),
    "checks": (
        {"callbacks", "clipping", "config", "config_checks", "strategies"},
        {"datasets", "torch", "transformers"},
    ),
    "callbacks": ({"clipping", "resume"}, {"transformers"}),
    "policy_host": (
        {"callbacks", "checks", "clipping", "config", "metrics", "resume"},
        {"transformers"},
    ),
    "plain_checkpoint": ({"checkpoints"}, {"safetensors", "torch"}),
    "export": ({"blockwise", "float8", "parity", "plain_checkpoint"}, {"torch", "safetensors", "transformers"}),
    "reference": ({"config", "float8", "switchable"}, {"torch", "transformers"}),
    "checkpoints": ({"_upstream", "config", "strategies"}, set()),
    "report": ({"callbacks", "config", "float8"}, set()),
    "trainer": (set(MODULES), {"torch", "trl", "transformers", "accelerate"}),
}
# Outside the two `_upstream` modules, libraries are used by the names their root exports. The exceptions are what the
# library's own documentation tells users to import from a submodule.
DOCUMENTED = {
    "transformers.trainer_callback": {"ExportableState"},
    "torchao.float8": {"convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp"},
    "accelerate.utils": {"broadcast_object_list"},
}
PUBLIC_AT_ROOT = ("accelerate", "peft", "torchao", "transformers", "trl", "vllm")


@dataclass(frozen=True)
class Import:
    module: str  # absolute, or the bare name of a module of this package
    names: tuple[str, ...]
    internal: bool
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`

    @property
    def root(self) -> str:
        return self.module.split(".")[0]


def read_imports(source: str) -> list[Import]:
    found = []

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                internal = alias.name.split(".")[0] == "trl_fp8"
                found.append(Import(alias.name.removeprefix("trl_fp8."), (), internal, lazy, typing))
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module or "", tuple(alias.name for alias in node.names)
            if node.level == 0 and module.split(".")[0] != "trl_fp8":
                found.append(Import(module, names, False, lazy, typing))
            elif module in ("", "trl_fp8"):  # `from . import checks`
                found.extend(Import(name, (), True, lazy, typing) for name in names)
            else:
                found.append(Import(module.removeprefix("trl_fp8."), names, True, lazy, typing))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, lazy, True)
            for child in node.orelse:
                visit(child, lazy, typing)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, lazy or inside, typing)

    visit(ast.parse(source), False, False)
    return found


IMPORTS = {name: read_imports(path.read_text()) for name, path in MODULES.items()}


def test_the_reader_of_imports_sees_every_form():
    source = """
import torch.nn as nn, os
from . import checks
from .clipping import solve
from trl_fp8.metrics import Metric
from trl.trainer.utils import pad
if TYPE_CHECKING:
    from .trainer import FP8GRPOTrainer
def f():
    import vllm
class C:
    try:
        from peft import LoraConfig
    except ImportError:
        pass
"""
    assert read_imports(source) == [
        Import("torch.nn", (), False, False, False),
        Import("os", (), False, False, False),
        Import("checks", (), True, False, False),
        Import("clipping", ("solve",), True, False, False),
        Import("metrics", ("Metric",), True, False, False),
        Import("trl.trainer.utils", ("pad",), False, False, False),
        Import("trainer", ("FP8GRPOTrainer",), True, False, True),
        Import("vllm", (), False, True, False),
        Import("peft", ("LoraConfig",), False, False, False),
    ]


def test_every_module_has_a_place_in_the_table():
    assert set(MODULES) <= set(ALLOWED)
    assert PURE | {"_upstream", "trainer"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_in_one_direction(name):
    internal, external = ALLOWED[name]
    used = [entry for entry in IMPORTS[name] if not entry.typing]
    assert {entry.root for entry in used if entry.internal} <= internal
    assert {entry.root for entry in used if not entry.internal} - set(sys.stdlib_module_names) <= external


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_neither_log_nor_print(name):
    assert {entry.root for entry in IMPORTS[name]} & {"logging", "warnings"} == set()
    assert "print(" not in MODULES[name].read_text()


def test_nothing_imports_the_trainer_but_the_package():
    importers = {
        name for name, imports in IMPORTS.items() for entry in imports
        if entry.internal and entry.root == "trainer" and not entry.typing
    }  # fmt: skip
    assert importers == {"__init__"}


def test_no_module_but_upstream_imports_private_names():
    private = []
    for name, imports in IMPORTS.items():
        for entry in imports:
            if name.startswith("_upstream") or entry.internal or entry.root not in PUBLIC_AT_ROOT:
                continue
            documented = bool(entry.names) and set(entry.names) <= DOCUMENTED.get(entry.module, set())
            underscored = any(part.startswith("_") for part in (*entry.module.split("."), *entry.names))
            if underscored or ("." in entry.module and not documented):
                private.append(f"{name}: {entry.module} {entry.names}")
    assert private == []


def test_vllm_is_imported_inside_functions_only():
    eager = [name for name, imports in IMPORTS.items() for entry in imports if entry.root == "vllm" and not entry.lazy]
    assert eager == []


@pytest.mark.parametrize("name", MODULES)
def test_no_file_holds_two_ideas(name):
    num_lines = len(MODULES[name].read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name}.py has {num_lines} lines: split it by idea"


@pytest.mark.parametrize("name", MODULES)
def test_no_function_holds_two_ideas(name):
    functions = [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [entry for entry in functions if entry[1] > MAX_FUNCTION_LINES] == []


def test_importing_the_package_imports_no_vllm():
    # The `import` statements that run, with the module they stand in. TRL itself imports vLLM where it is installed.
    script = """
import builtins
original, seen = builtins.__import__, []
def record(name, globals=None, locals=None, fromlist=(), level=0):
    seen.append((str((globals or {}).get("__name__")).split(".")[0], name.split(".")[0]))
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = record
import trl_fp8
ours = {name for importer, name in seen if importer == "trl_fp8"}
assert "torch" in ours, "the recorder sees nothing"
assert "vllm" not in ours
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert result.returncode == 0, result.stderr[-2000:]
