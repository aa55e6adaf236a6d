"""The ruler of the project's English: a floor for docstrings, help and documents."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lenience.cli.commands import COMMAND_EXAMPLES

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src/lenience").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
VERBS = set((ROOT / "tests/verbs.txt").read_text().split())
AT_LEAST = 0.95
"""Share of function docstrings that begin with a verb."""
NO_BEGINNING = {"Of", "At", "Which", "Where", "What", "Whether", "By", "From"}
"""First words that no help string has."""
NO_NOUN = NO_BEGINNING | {"How", "In", "After", "Up", "For", "With", "As", "None"}
"""First words that no attribute doc has."""
MOST_WORDS = {"README.md": 25}
OTHERWISE = 35
"""Words of the longest sentence in other pages."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the docstring of each function."""
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                yield place, ast.get_docstring(node) or ""


def attribute_docs() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each string under an assignment."""
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            body = getattr(node, "body", None)
            for first, then in itertools.pairwise(
                body if isinstance(body, list) else []
            ):
                if (
                    isinstance(first, ast.Assign | ast.AnnAssign)
                    and isinstance(then, ast.Expr)
                    and isinstance(then.value, ast.Constant)
                ):
                    yield f"{path.relative_to(ROOT)}:{then.lineno}", then.value.value


def prose(text: str) -> Iterator[str]:
    """Yield the sentences of a page outside of code, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
        if paragraph.lstrip().startswith(("|", "#", "!", "[!", "    ", "<")):
            continue
        plain = re.sub(r"`[^`]*`", "X", LINK.sub("]", " ".join(paragraph.split())))
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(])", plain)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    kept = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"\s+", "-", text.strip()) for text in kept}


def test_function_docstrings_begin_with_a_verb() -> None:
    found = [(place, text.split()[0].strip(".,:;")) for place, text in docstrings()]
    others = [f"{place}: {word}" for place, word in found if word not in VERBS]
    assert 1 - len(others) / len(found) >= AT_LEAST, "\n".join(others)


def test_module_docstrings_begin_with_one_line() -> None:
    for path in SOURCE:
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "."
        assert "\n" not in doc.split("\n\n")[0], path


def test_attribute_docs_are_noun_phrases() -> None:
    """True of a switch is said by "True if"."""
    others = [
        f"{place}: {text}"
        for place, text in attribute_docs()
        if isinstance(text, str) and text.split()[0].strip(".,:;") in NO_NOUN
    ]
    assert others == []


@pytest.mark.parametrize("command", COMMAND_EXAMPLES)
def test_help_strings_name_the_thing(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from lenience.cli.commands import app

    app.parse_args([], exit_on_error=False)
    arguments = app[command].assemble_argument_collection(parse_docstring=True)
    helps = [str(argument.parameter.help or "") for argument in arguments]
    helps = [text for text in helps if text]
    assert [text for text in helps if text.split()[0] in NO_BEGINNING] == []
    assert all(text[0].isupper() and text.rstrip()[-1] in ".…)" for text in helps)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    most = MOST_WORDS.get(page.name, OTHERWISE)
    long = [s for s in prose(page.read_text(encoding="utf-8")) if len(s.split()) > most]
    assert long == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_are_links_and_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for path in re.findall(r"(?<!\[)`([\w-]+/[\w./-]+\.(?:md|py|json|svg|png))`", text):
        assert not (ROOT / path).is_file(), f"{page.name}: {path} is no link"
    for target in LINK.findall(text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{page.name}: {target}"
        if anchor and to.suffix == ".md":
            assert anchor in anchors(to), f"{page.name}: {target}"
