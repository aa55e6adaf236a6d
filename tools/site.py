"""Hooks of the documentation site (mkdocs.yml): links to the repository, the commands' help."""

from __future__ import annotations

import contextlib
import html
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMANDS = "<!-- commands -->"
MARK = re.compile(r"^<!-- (?:not )?measured.*?-->\n", re.M)
"""Comments that name results files, for the tests."""

PIPE_IN_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code with an escaped pipe in a table, which only GitHub shows without the backslash."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page's text for the site."""
    if page.file.src_uri == "contributing.md":
        markdown = _from_root((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _commands())
    markdown = MARK.sub("", markdown)
    markdown = PIPE_IN_CODE.sub(_code, markdown)
    address = f"{config.repo_url}/blob/main/"
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({address}\1)", markdown)


def _code(found: re.Match[str]) -> str:
    """Return code with escaped pipes as HTML."""
    text = html.escape(found[1].replace("\\|", "|")).replace("|", "&#124;")
    return f"<code>{text}</code>"


def _from_root(markdown: str) -> str:
    """Return a page of the repository's root with links as from docs/."""
    markdown = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", markdown)
    return re.sub(
        r"\]\((?!http|#|[\w-]+\.(?:md|svg|png))([^)]+)\)", r"](../\1)", markdown
    )


def _commands() -> str:
    """Return the help of every command as sections."""
    from rich.console import Console

    from lenience.cli.commands import COMMAND_EXAMPLES, app

    sections = []
    for name in COMMAND_EXAMPLES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            app.help_print([name], console=Console(file=out, width=96, no_color=True))
        sections.append(f"## {name}\n\n```text\n{out.getvalue().strip()}\n```\n")
    return "\n".join(sections)
