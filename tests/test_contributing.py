"""CONTRIBUTING's examples, added to a copy of the source as it says: one file and one name in a
registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (src/\S+)\n(.*?)```", GUIDE, re.S))
REGISTRIES = {
    "rules": (
        "rules/registry.py",
        "        Judge,\n",
        "        Judge,\n        Near,\n",
    ),
    "drafting": (
        "drafting/registry.py",
        "        Datastore,\n    )",
        "        Datastore,\n        Repeat,\n    )",
    ),
    "stops": (
        "drafting/registry.py",
        "Likely, Gate)",
        "Likely, Gate, Doubling)",
    ),
    "tasks": (
        "tasks/__init__.py",
        '"wordmath": WordMath}',
        '"wordmath": WordMath, "parity": Parity}',
    ),
}
"""In which file of a package the name is added, and where."""
FOUND = {
    "rules": """
from lenience.rules.settings import expand, ladder
assert {"near:0.1", "near:0.3"} <= set(expand(("all",), 0.0))
assert list(map(str, ladder("near"))) == ["near:0.1", "near:0.3"]""",
    "drafting": """
import lenience
pair = lenience.load_pair(compile=False)
out = pair.generate([7, 8], drafter="repeat", window=2, max_new_tokens=4)
assert out.draft_passes == 0 and len(out.tokens) == 4""",
    "stops": """
import lenience
pair = lenience.load_pair(compile=False)
from lenience.tasks import WordMath, take
prompt, other = (sample.prompt for sample in take(WordMath(), "test", 2))
out = pair.generate(prompt, stop="doubling", window=16, max_new_tokens=40)
assert out.tokens == pair.generate(prompt, rule="target", max_new_tokens=40).tokens
widths = [step.drafted for step in pair.stream(prompt, stop="doubling", window=16)]
assert widths[0] == 1 and max(widths) > 2, widths
together = pair.generate_batch([prompt, other], stop="doubling", window=16, max_new_tokens=40)
assert together[0].trace == out.trace""",
    "tasks": """
from lenience.tasks import load_task, take
assert [sample.reference for sample in take(load_task("parity"), "test", 2)] == ["odd", "odd"]""",
}
"""Where else, by CONTRIBUTING, an example is then known."""
CLASSES = {
    "rules": "Near",
    "drafting": "Repeat",
    "stops": "Doubling",
    "tasks": "Parity",
}


def kind_of(path: str) -> str:
    """The kind of an example, by its package; what a stop is, its code says."""
    return "stops" if "(Stop)" in EXAMPLES[path] else path.split("/")[2]


def copy_of_the_source(folder: Path) -> Path:
    source = ROOT / "src" / "lenience"
    copy = folder / "lenience"
    shutil.copytree(
        source, copy, ignore=shutil.ignore_patterns("embedded", "__pycache__")
    )
    (copy / "embedded").symlink_to(source / "embedded")
    return copy


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_picked_up_by_what_tests_all_of_its_kind(
    path: str, tmp_path: Path
) -> None:
    code, package = EXAMPLES[path], kind_of(path)
    assert len(code.strip().splitlines()) <= 30
    copy = copy_of_the_source(tmp_path)
    (copy.parent / Path(path).relative_to("src")).write_text(code)
    file, before, after = REGISTRIES[package]
    registry, name = copy / file, CLASSES[package]
    text = registry.read_text()
    assert text.count(before) == 1
    module = ".".join(Path(path).relative_to("src").with_suffix("").parts)
    added = f"from {module} import {name}\n"
    text = text.replace(before, after).replace(
        "from lenience", added + "from lenience", 1
    )
    registry.write_text(text)
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        name.lower(),
    ]
    of_its_kind = (
        []
        if package == "stops"
        else [[*run, str(ROOT / "tests" / "test_registries.py")]]
    )
    for command in (*of_its_kind, [sys.executable, "-c", FOUND[package]]):
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        result = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]


def test_there_is_an_example_of_each() -> None:
    assert {kind_of(path) for path in EXAMPLES} == set(REGISTRIES)
