"""Size and openness of the package: files, lines, lengths, private names of others.

python scripts/structure.py [src/trl_fp8]      # of another commit: git worktree add /tmp/old COMMIT
"""

import ast
import sys
from pathlib import Path
from statistics import median


def quantiles(lengths: list[int]) -> str:
    ordered = sorted(lengths)
    return f"median {median(ordered):g}, p90 {ordered[int(0.9 * (len(ordered) - 1))]}, max {ordered[-1]}"


def code_lines(source: str, tree: ast.Module) -> int:
    """Lines that are neither blank, nor a comment, nor in a docstring."""
    documented = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for number, line in lines if number not in documented and line.strip() and line.strip()[0] != "#")


def main(package: Path) -> None:
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    functions = [node for _, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.id for _, node in nodes if isinstance(node, ast.Name)}
    own |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    private: dict[bool, set[str]] = {True: set(), False: set()}
    for path, node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in own:
                private[path.stem.startswith("_upstream")].add(node.attr)
    folders = {path.parent for path in sources}
    print(f"files: {len(sources)} in {len(folders)} folders, most in one: ", end="")
    print(max(sum(path.parent == folder for path in sources) for folder in folders))
    print(f"lines: {sum(len(source.splitlines()) for source in sources.values())}, of code: ", end="")
    print(sum(code_lines(sources[path], tree) for path, tree in trees.items()))
    print(f"lines of a file: {quantiles([len(source.splitlines()) for source in sources.values()])}")
    print(f"lines of a function: {quantiles([(f.end_lineno or 0) - f.lineno + 1 for f in functions])}")
    print(f"private attributes of others in _upstream modules: {len(private[True])}")
    print(f"elsewhere: {len(private[False])} ({', '.join(sorted(private[False]))})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/trl_fp8"))
