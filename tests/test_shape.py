"""The shape of the code: imports point one way, and light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lenience

SOURCE = Path(lenience.__file__).parent
ORDER = ["errors", "spec", "core", "divergence", "bounds", "journal", "heads", "acceptance", "rules", "stops", "certificate", "ladder", "tasks", "uses", "model", "session", "memory", "replay", "export", "compiled", "drafters", "decode", "pair", "mining", "annotated", "compare",
         "report", "certify", "audit", "steps", "choices", "demo", "cli"]  # fmt: skip
"""Each module imports only what stands before it."""


def imported(path: Path) -> set[str]:
    """Names of lenience's modules that a file imports, those for type checkers alone left out."""
    tree = ast.parse(path.read_text())
    skipped = {id(node) for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
               for node in ast.walk(block)}  # fmt: skip
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and (node.module or "").startswith("lenience."):
            found.add((node.module or "").split(".")[1])
    return found


def test_imports_point_one_way() -> None:
    names = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert names == set(ORDER)
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        for name in imported(path) - {module}:
            assert ORDER.index(name) < ORDER.index(module), f"{path.name} imports {name}"


def test_rules_never_import_the_model() -> None:
    assert not (imported(SOURCE / "rules.py") | imported(SOURCE / "acceptance.py")) & {
        "model",
        "session",
        "replay",
        "export",
        "compiled",
        "drafters",
        "decode",
        "pair",
    }


def test_tasks_the_journal_and_the_command_line_start_without_torch() -> None:
    code = "import sys, lenience.tasks, lenience.runs.journal, lenience.runs.uses, lenience.cli.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
