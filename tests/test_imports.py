"""The architecture, read from the imports: four wings, one direction, one door to private upstream names.

The tables hold in both directions: an import that they do not allow fails, and so does an allowance nobody uses.
"""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from trl_fp8 import _upstream as upstream
from trl_fp8.float8 import RECIPES
from trl_fp8.rollout import _upstream as vllm_upstream


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
    "float8": ({"_upstream"}, {"accelerate", "torch", "torchao", "transformers"}),
    "reductions": (set(), {"torch"}),
    "clipping": ({"reductions"}, {"torch", "transformers"}),
    "diagnostics": ({"clipping", "reductions"}, {"torch"}),
    "config_checks": ({"clipping", "float8"}, set()),
    "clip_checks": ({"clipping", "config_checks"}, {"torch"}),
    "config": ({"clip_checks", "clipping", "config_checks", "float8"}, {"trl"}),
    "distributed": ({"config", "float8"}, {"torch"}),
    "rollout": (
        {"config", "float8", "reductions"},
        {"accelerate", "peft", "requests", "safetensors", "torch", "transformers", "trl", "urllib3", "vllm"},
    ),
    "checks": (
        {"clipping", "config", "distributed", "float8"},
        {"accelerate", "datasets", "torch", "transformers"},
    ),
    "checkpoints": ({"_upstream", "config", "diagnostics", "distributed"}, {"transformers", "trl"}),
    "policy_host": (
        {"checkpoints", "checks", "clip_checks", "clipping", "config", "diagnostics", "reductions"},
        {"torch", "trl"},
    ),
    "reference": ({"config", "float8"}, {"accelerate", "transformers", "trl"}),
    "plain_checkpoint": ({"checkpoints"}, {"safetensors", "torch"}),
    "export": ({"float8", "plain_checkpoint", "rollout"}, {"safetensors", "torch", "transformers"}),
    "startup": ({"clipping", "config", "float8"}, set()),
    "trainer": (
        {
            "checkpoints",
            "checks",
            "clip_checks",
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
PURE_WINGS = ("clipping.", "diagnostics.", "reductions")
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
# Clip policies are callbacks of transformers; what they call is pure
PURE = {
    name
    for name in MODULES
    if name.startswith(PURE_WINGS)
    and name != "clipping.policy"
    and "clipping.policy" not in {entry.module for entry in IMPORTS[name]}
}


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
from ..clipping.decide import decide
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
        Import("clipping.decide", ("decide",), True, False, False),
        Import("diagnostics.window", ("Metric",), True, False, False),
        Import("trl.trainer.utils", ("pad",), False, False, False),
        Import("trainer", ("FP8GRPOTrainer",), True, False, True),
        Import("vllm", (), False, True, False),
        Import("peft", ("LoraConfig",), False, False, False),
    ]


def test_every_module_has_a_room_in_the_table():
    assert {room_of(name) for name in MODULES} == set(ROOMS)
    assert set(WINGS) <= set(ROOMS)
    assert {f"clipping.{name}" for name in ("search", "decide", "statistics", "importance", "batch")} <= PURE
    assert {name for name in MODULES if name.startswith("diagnostics.")} <= PURE


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


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(source: str) -> set[str]:
    """Functions, classes, variables and attributes that a module gives a name."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def private_reads(source: str) -> set[str]:
    """Names of private attributes that a module reads, of whatever object."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if is_private(node.attr) and not isinstance(node.ctx, ast.Store)}


def foreign_reads(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> private attributes it reads that no module defines, the doors to upstream apart."""
    own = {name: source for name, source in sources.items() if not name.endswith("_upstream")}
    defined = set().union(*map(defined_names, own.values()))
    reads = {name: private_reads(source) - defined for name, source in own.items()}
    return {name: found for name, found in reads.items() if found}


def test_the_reader_of_private_attributes_sees_every_form():
    ours = "class A:\n    _field: int\n    def _method(self):\n        self._set = 1\n_constant = 2"
    user = "a._field, a._method(), a._set, a.b._constant, a.__dict__, a._\na.b._foreign.c()\ndel a._gone\nx._mine = 1"
    sources = {"ours": ours, "user": user, "rollout._upstream": "a._hidden\n_foreign = 1"}
    assert foreign_reads(sources) == {"user": {"_foreign", "_gone"}}


def test_no_module_but_upstream_reads_private_attributes_of_others():
    """What subclasses read through self is listed; an entry that nobody reads is stale."""
    listed = {*upstream.TRL_OVERRIDES, *upstream.HF_OVERRIDES, *vllm_upstream.VLLM_OVERRIDES}
    reads = foreign_reads(SOURCES)
    unlisted = {name: found - listed - upstream.PARENT_ATTRIBUTES.keys() for name, found in reads.items()}
    assert {name: found for name, found in unlisted.items() if found} == {}
    assert upstream.PARENT_ATTRIBUTES.keys() - set().union(*reads.values()) == set()


def recipe_literals(source: str, recipes: set[str]) -> list[str]:
    """Lines with a string that is the name of a recipe, `Literal[...]` and defaults apart."""
    tree = ast.parse(source)
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            allowed |= {id(child) for child in ast.walk(node.slice)}
        elif isinstance(node, ast.arguments):
            allowed |= {id(default) for default in (*node.defaults, *node.kw_defaults)}
        elif isinstance(node, ast.keyword) and node.arg == "default":
            allowed.add(id(node.value))
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in recipes]
    return [f"{node.lineno}: {node.value}" for node in strings if id(node) not in allowed]


def test_the_reader_of_recipe_names_sees_every_form():
    source = """
kind: Literal["none", "big"] = field(default="big", metadata={"help": "'big' or none"})
def f(a="big", *, b="big"):
    "big things"
    return a == "none" or b == "big" or a in ("small", "big")
TABLE = {"big": 1, "none": 2}
f(recipe="big")
"""
    assert sorted(recipe_literals(source, {"big"})) == ["5: big", "5: big", "6: big", "7: big"]


def test_only_the_records_know_recipes_by_name():
    """A recipe is added in `float8/recipes.py` and in the `Literal` of the config, and nowhere else."""
    found = {name: recipe_literals(source, set(RECIPES)) for name, source in SOURCES.items()}
    assert found.pop("float8.recipes") != []
    assert {name: lines for name, lines in found.items() if lines} == {}


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
