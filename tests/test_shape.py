"""The shape of the code: packages import one way, what is light stays light, and nothing grows past
its caps."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lenience

SOURCE = Path(lenience.__file__).parent
TESTS = Path(__file__).parent
BESIDE = [
    Path(__file__).parents[1] / name
    for name in ("studies", "benchmarks", "tools/embedded")
]
"""What is not imported, and keeps to the caps too."""
ORDER = [
    ["core"],
    ["models", "heads", "tasks"],
    ["rules"],
    ["drafting"],
    ["decoding"],
    ["runs"],
    ["certification"],
    ["serving"],
    ["integrations"],
    ["mining", "evaluation"],
    ["training"],
    ["cli"],
]
"""Packages, lowest first: each imports only from those in rows before its own."""
NEVER = [("rules", "models"), ("heads", "models")]
"""Packages that stay apart, whatever their order."""
TORCH_FREE = [
    "lenience",
    "lenience.core.errors",
    "lenience.core.files",
    "lenience.core.spec",
    "lenience.tasks",
]
TORCH_FREE += ["lenience.runs.journal", "lenience.runs.uses", "lenience.cli"]


def modules() -> Iterator[tuple[str, Path]]:
    """(package, file) of every module; the top module's package is ""."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        yield parts[0] if len(parts) > 1 else "", path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Dotted names of lenience's modules that a file imports, also for type checkers alone."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {
                alias.name for alias in node.names if alias.name.startswith("lenience")
            }
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.relative_to(SOURCE)}: a relative import"
            module = node.module or ""
            if module == "lenience" or (
                module.startswith("lenience.") and module.count(".") == 1
            ):
                found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
            elif module.startswith("lenience."):
                found.add(module)
    return found


def packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.count(".")} - {
        "InputError"
    }


def test_packages_import_one_way() -> None:
    rank = {name: i for i, row in enumerate(ORDER) for name in row}
    assert {package for package, _ in modules()} == {"", *rank}
    top = {path.name for package, path in modules() if not package}
    assert top == {"__init__.py", "__main__.py"}, "a new module belongs into a package"
    for package, path in modules():
        for other in packages(path) - {package} if package else ():
            assert rank[other] < rank[package], (
                f"{path.relative_to(SOURCE)} imports {other}"
            )


def test_modules_of_a_package_import_without_circles() -> None:
    names = {
        ".".join(("lenience", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for _, path in modules()
    }
    edges = {
        name: (imported(path) & names.keys()) - {name} for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


@pytest.mark.parametrize(("package", "other"), NEVER)
def test_what_stays_apart(package: str, other: str) -> None:
    for name, path in modules():
        if name == package:
            assert other not in packages(path), (
                f"{path.relative_to(SOURCE)} imports {other}"
            )


@cache
def capped() -> list[tuple[str, ast.AST]]:
    """Every node of the code that keeps to the caps, and where it stands."""
    return [
        (f"{path.relative_to(folder.parent)}:{getattr(node, 'lineno', 0)}", node)
        for folder in (SOURCE, *BESIDE)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(parsed(path))
    ]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for where, node in capped():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{where} {node.name}", node


def test_functions_stay_small() -> None:
    for where, node in functions():
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno < 60, f"{where}: more than 60 lines"
        assert sum(1 for _ in ast.walk(node)) <= 400, f"{where}: more than 400 nodes"


def docstrings(path: Path) -> list[ast.Expr]:
    """Strings that stand alone as statements."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(node)
    return found


def code_lines(path: Path) -> int:
    """The number of lines that hold more than a comment or a part of a docstring."""
    told = set[int]()
    for text in docstrings(path):
        told |= set(range(text.lineno, (text.end_lineno or 0) + 1))
    found = 0
    for number, line in enumerate(path.read_text().split("\n"), 1):
        found += bool(line.strip()) and number not in told and line.strip()[0] != "#"
    return found


def nodes(path: Path) -> Iterator[ast.AST]:
    """The syntax nodes of a file, without docstrings."""
    left_out = set[ast.AST]()
    for text in docstrings(path):
        left_out |= {text, text.value}
    for node in ast.walk(parsed(path)):
        if node not in left_out:
            yield node


def test_a_line_holds_one_thought() -> None:
    """At most 9 syntax nodes a line of code, 3 comprehensions per 100 lines, and few variables
    whose name says nothing."""
    files = [path for _, path in modules()]
    lines = sum(map(code_lines, files))
    found = [node for path in files for node in nodes(path)]
    assert len(found) / lines <= 9.0
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp
    assert sum(isinstance(node, comprehensions) for node in found) / lines <= 0.03
    names = (node.id for node in found if isinstance(node, ast.Name))
    assert sum(name == "one" for name in names) < 30


def test_functions_take_few_parameters() -> None:
    """What is one thought is one object: a configuration, a request, a setup."""
    for where, node in functions():
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [one for one in parameters if one.arg not in ("self", "cls")]
        assert len(named) <= 6, f"{where}: {len(named)} parameters"


def test_calls_pass_few_arguments_by_position() -> None:
    for where, node in capped():
        if isinstance(node, ast.Call):
            assert len(node.args) <= 5, f"{where}: name some of the arguments"


def test_light_modules_start_without_torch() -> None:
    code = f"import sys, {', '.join(TORCH_FREE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_slow_cases_are_of_tests_that_exist() -> None:
    named = {
        line.split("[")[0]
        for line in (TESTS / "slow.txt").read_text().split("\n")
        if line and not line.startswith("#")
    }
    found = {
        f"{path.name}::{node.name}"
        for path in TESTS.glob("test_*.py")
        for node in parsed(path).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert named - found == set()
