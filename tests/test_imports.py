"""The architecture, read from the imports: four wings, one direction, one door to private upstream names.

The tables hold in both directions: an import that they do not allow fails, and so does an allowance nobody uses.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "src" / "trl_fp8"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "__pycache__" not in path.parts
}
WINGS = ("float8", "clipping", "diagnostics", "rollout")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60

# room (a wing, or a module at the top) -> rooms it imports, and distributions outside the standard library
ROOMS = {
    "_upstream": (set(), {"peft", "torch", "torchao", "transformers", "trl"}),
    "float8": ({"_upstream", "config"}, {"torch", "torchao", "transformers", "trl"}),
    "clipping": ({"resume"}, {"torch", "transformers"}),
    "diagnostics": ({"clipping"}, {"torch"}),
    "config_checks": ({"clipping"}, set()),
    "config": ({"clipping", "config_checks", "rollout"}, {"trl"}),
    "distributed": ({"config"}, {"torch"}),
    "rollout": (
        {"config", "float8"},
        {"accelerate", "peft", "requests", "safetensors", "torch", "transformers", "trl", "urllib3", "vllm"},
    ),
    "checks": ({"clipping", "config", "config_checks", "distributed"}, {"datasets", "torch", "transformers"}),
    "resume": (set(), {"transformers"}),
    "policy_host": ({"checks", "clipping", "config", "diagnostics", "resume"}, {"transformers", "trl"}),
    "checkpoints": ({"_upstream", "config", "distributed"}, {"trl"}),
    "plain_checkpoint": ({"checkpoints"}, {"safetensors", "torch"}),
    "export": ({"float8", "plain_checkpoint", "rollout"}, {"safetensors", "torch", "transformers"}),
    "reference": ({"config", "float8"}, {"torch", "transformers", "trl"}),
    "startup": ({"clipping", "config", "float8"}, set()),
    "trainer": (
        {
            "checkpoints",
            "checks",
            "clipping",
            "config",
            "diagnostics",
            "distributed",
            "float8",
            "policy_host",
            "reference",
            "rollout",
            "startup",
        },
        {"torch", "transformers", "trl"},
    ),
    "__init__": (set(), set()),  # lazy: by name
}
# Modules that know tensors and numbers only
PURE = {name for name in MODULES if name.startswith(("clipping.", "diagnostics."))} - {
    "clipping.policy",
    "clipping.calibrated",
}
# Outside the `_upstream` modules, libraries are used by the names their root exports. The exceptions are what the
# library's own documentation tells users to import from a submodule.
DOCUMENTED = {
    # broadcast_object_list: docs of accelerate, "Utility functions". The other two are what TRL and transformers ask.
    "accelerate.utils": {"broadcast_object_list", "find_tied_parameters", "is_peft_model"},
    "torchao.float8": {"convert_to_float8_training"},
    "transformers.trainer_callback": {"ExportableState"},
}
PUBLIC_AT_ROOT = ("accelerate", "peft", "torchao", "transformers", "trl", "vllm")


@dataclass(frozen=True)
class Import:
    module: str  # absolute; of this package, without its name
    names: tuple[str, ...]
    internal: bool
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`

    @property
    def room(self) -> str:
        return self.module.split(".")[0]


def read_imports(source: str, package: str = "") -> list[Import]:
    """Imports of a module that lies in `package` (empty for the top of trl_fp8)."""
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
                return
            above = {0: "", 1: package, 2: ""}[node.level]
            base = ".".join(part for part in (above, module.removeprefix("trl_fp8").lstrip(".")) if part)
            for name in names:  # a name may be a module: `from . import checks`
                inner = f"{base}.{name}".lstrip(".")
                if inner in MODULES or not base:
                    found.append(Import(inner, (), True, lazy, typing))
                else:
                    found.append(Import(base, (name,), True, lazy, typing))
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


def package_of(name: str) -> str:
    return name.rpartition(".")[0]


def room_of(name: str) -> str:
    return name.split(".")[0]


SOURCES = {name: path.read_text() for name, path in MODULES.items()}
IMPORTS = {name: read_imports(source, package_of(name)) for name, source in SOURCES.items()}


def imports_of_room(room: str) -> tuple[set[str], set[str]]:
    """What the modules of `room` import, types apart: other rooms, and distributions."""
    used = [entry for name in MODULES if room_of(name) == room for entry in IMPORTS[name]]
    internal = {entry.room for entry in used if entry.internal and not entry.typing} - {room}
    external = {entry.room for entry in used if not entry.internal} - set(sys.stdlib_module_names)
    return internal, external


def test_the_reader_of_imports_sees_every_form():
    source = """
import torch.nn as nn, os
from .. import checks
from . import same_model
from .engine import SyncedEngine
from ..clipping.decide import solve
from trl_fp8.diagnostics.window import Metric
from trl.trainer.utils import pad
if TYPE_CHECKING:
    from ..trainer import FP8GRPOTrainer
def f():
    import vllm
class C:
    try:
        from peft import LoraConfig
    except ImportError:
        pass
"""
    assert read_imports(source, "rollout") == [
        Import("torch.nn", (), False, False, False),
        Import("os", (), False, False, False),
        Import("checks", (), True, False, False),
        Import("rollout.same_model", (), True, False, False),
        Import("rollout.engine", ("SyncedEngine",), True, False, False),
        Import("clipping.decide", ("solve",), True, False, False),
        Import("diagnostics.window", ("Metric",), True, False, False),
        Import("trl.trainer.utils", ("pad",), False, False, False),
        Import("trainer", ("FP8GRPOTrainer",), True, False, True),
        Import("vllm", (), False, True, False),
        Import("peft", ("LoraConfig",), False, False, False),
    ]


def test_every_module_has_a_room_in_the_table():
    assert {room_of(name) for name in MODULES} == set(ROOMS)
    assert set(WINGS) <= set(ROOMS)
    assert {"clipping.decide", "diagnostics.window"} <= PURE


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_table_says_and_nothing_else(room):
    assert imports_of_room(room) == ROOMS[room]


def test_the_rooms_stand_in_one_direction():
    """Each room imports rooms above it in the table only."""
    order = list(ROOMS)
    backwards = []
    for room, (internal, _) in ROOMS.items():
        backwards += [(room, other) for other in internal if order.index(other) > order.index(room)]
    assert backwards == []


def test_no_modules_import_each_other():
    graph = {
        name: {entry.module for entry in imports if entry.internal and not entry.typing}
        for name, imports in IMPORTS.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"{' -> '.join((*path, name))}"
        if name in done:
            return
        for other in graph.get(name, graph.get(f"{name}.__init__", set())):
            visit(other, (*path, name))
        done.add(name)

    for name in graph:
        if not name.endswith("__init__"):
            visit(name, ())
    assert len(done) >= 30


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_know_tensors_only(name):
    external = {entry.room for entry in IMPORTS[name] if not entry.internal} - set(sys.stdlib_module_names)
    assert external <= {"torch"}
    internal = {entry.module for entry in IMPORTS[name] if entry.internal}
    assert {module for module in internal if module not in PURE | set(WINGS)} == set()
    assert {entry.room for entry in IMPORTS[name]} & {"logging", "warnings"} == set()
    assert "print(" not in SOURCES[name]


def test_no_module_but_upstream_imports_private_names():
    private = []
    used: dict[str, set[str]] = {}
    for name, imports in IMPORTS.items():
        for entry in imports:
            if name.endswith("_upstream") or entry.internal:
                continue
            underscored = any(part.startswith("_") for part in (*entry.module.split("."), *entry.names))
            if underscored:
                private.append(f"{name}: {entry.module} {entry.names}")
            if entry.room in PUBLIC_AT_ROOT and "." in entry.module:
                documented = set(entry.names) & DOCUMENTED.get(entry.module, set())
                used.setdefault(entry.module, set()).update(documented)
                if not entry.names or documented != set(entry.names):
                    private.append(f"{name}: {entry.module} {entry.names}")
    assert private == []
    assert used == DOCUMENTED  # no stale exception


def test_vllm_is_imported_inside_functions_only():
    eager = [name for name, imports in IMPORTS.items() for entry in imports if entry.room == "vllm" and not entry.lazy]
    assert eager == []


@pytest.mark.parametrize("name", MODULES)
def test_no_file_holds_two_ideas(name):
    num_lines = len(SOURCES[name].splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name} has {num_lines} lines: split it by idea"


@pytest.mark.parametrize("name", MODULES)
def test_no_function_holds_two_ideas(name):
    functions = [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(ast.parse(SOURCES[name]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [entry for entry in functions if entry[1] > MAX_FUNCTION_LINES] == []


def run_python(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent, check=False
    )


def test_importing_the_package_imports_no_vllm():
    # The `import` statements that run, with the module they stand in. TRL itself imports vLLM where it is installed.
    script = """
import builtins
original, seen = builtins.__import__, []
def record(name, globals=None, locals=None, fromlist=(), level=0):
    seen.append((str((globals or {}).get("__name__")).split(".")[0], name.split(".")[0]))
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = record
from trl_fp8 import FP8GRPOTrainer
ours = {name for importer, name in seen if importer == "trl_fp8"}
assert "torch" in ours, "the recorder sees nothing"
assert "vllm" not in ours
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("from trl_fp8.clipping import calibrate_bounds", ("trl", "transformers", "torchao", "accelerate", "peft")),
        ("from trl_fp8 import diagnostics", ("trl", "transformers", "torchao", "accelerate", "peft")),
        ("import trl_fp8", ("torch", "trl", "transformers")),
    ],
)
def test_the_mathematics_loads_torch_and_nothing_heavier(statement, without):
    script = f"""
import sys
{statement}
loaded = {{name.split(".")[0] for name in sys.modules}}
assert "trl_fp8" in loaded
print(sorted(loaded & set({without!r})), sum(name.startswith("trl_fp8") for name in sys.modules))
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr[-2000:]
    found, num_modules = result.stdout.strip().rsplit(" ", 1)
    assert found == "[]"
    assert int(num_modules) <= 15


def test_every_public_name_is_there():
    import trl_fp8

    assert set(trl_fp8.__all__) <= set(dir(trl_fp8))
    for name in trl_fp8.__all__:
        assert getattr(trl_fp8, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        trl_fp8.NoSuchName  # noqa: B018
