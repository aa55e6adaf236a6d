"""Prompts given on the command line, and the chat."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenience.cli.console import say, screen
from lenience.cli.tables import print_counts
from lenience.core.errors import InputError, first_line, reason

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.tasks.base import Messages

    GivenPrompt = tuple[str, str | Messages]
    """A prompt with its id."""

STDIN = "@-"
"""Prompt that stands for standard input; the command line replaces - by it."""
HELP = "/new begins anew, /quit or Ctrl-D ends"


def prompt_of(given: str | None, messages: Path | None) -> str | Messages | None:
    """Return the prompt: `given` itself, standard input for STDIN, the file's text for "@FILE", or
    the chat messages in the file `messages`; None if no prompt is given. Raises InputError for an
    unreadable file."""
    if messages is not None:
        if given is not None:
            raise InputError("--messages: replaces PROMPT; give one of them")
        return _messages(messages)
    if given == STDIN or (given is None and not sys.stdin.isatty()):
        return sys.stdin.read().rstrip("\n")
    if given is None or not given.startswith("@"):
        return given
    return _text(Path(given[1:]), "PROMPT").rstrip("\n")


def needed(prompt: str | Messages | None) -> str | Messages:
    """Return a prompt. Raises InputError if none was given."""
    if prompt is None:
        raise InputError("PROMPT: give a prompt, as an argument or on standard input")
    return prompt


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path}: cannot be read ({reason(error)})") from None


def _messages(path: Path) -> Messages:
    from lenience.tasks.rows import is_chat

    shape = '[{"role": "user", "content": "…"}, …]'
    text = _text(path, "--messages")
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"--messages {path}: not JSON ({error}); write {shape}"
        ) from None
    found = found.get("messages") if isinstance(found, dict) else found
    if not is_chat(found):
        raise InputError(f"--messages {path}: holds no chat; write {shape}")
    chat: Messages = found
    return chat


def prompts_in(path: Path) -> list[GivenPrompt]:
    """Return the prompts in a file, as (id, prompt): JSON rows with prompt or messages, or lines of
    text. Raises InputError with the line."""
    from lenience.tasks.jsonl import SUFFIXES
    from lenience.tasks.rows import USUAL_FIELDS, is_chat, read_rows

    found: list[GivenPrompt] = []
    if path.name.endswith(SUFFIXES):
        for number, (where, row) in enumerate(read_rows(path), 1):
            if not isinstance(row.get("prompt"), str) and not is_chat(
                row.get("messages")
            ):
                shape = (
                    'a "prompt" (text) or "messages" (a list of {"role", "content"})'
                )
                raise InputError(
                    f"{where}: needs {shape}; it has {', '.join(row) or 'nothing'}"
                )
            found.append((str(row.get("id", number)), USUAL_FIELDS.prompt_of(row)))
    else:
        lines = enumerate(_text(path, "--prompts").split("\n"), 1)
        found = [(str(number), line) for number, line in lines if line.strip()]
    if not found:
        raise InputError(f"--prompts {path}: holds no prompts")
    return found


def chat(pair: Pair, options: Mapping[str, Any]) -> None:
    """Answer typed lines until the input ends. With a chat template the lines form one
    conversation; without a template each line is a separate prompt."""
    from lenience.decoding.generation import Generation

    how = (
        ""
        if pair.target.chats
        else "; the target has no chat template: each line stands alone"
    )
    say(f"{HELP}{how}")
    said: Messages = []
    while (line := _line()) is not None:
        if line == "/new":
            said = []
        elif line.startswith("/") and len(line.split()) == 1:
            say(HELP)
            continue
        if line in ("", "/new"):
            continue
        asked = [*said, {"role": "user", "content": line}]
        out = Generation([])
        began = time.perf_counter()
        try:
            for step in pair.stream(asked if pair.target.chats else line, **options):
                out.add(step)
                print(step.text, end="", flush=True)
        except InputError as error:  # such as a chat that has grown too long
            say(f"lenience: {first_line(error)}")
            continue
        except KeyboardInterrupt:  # ends the answer, not the chat
            out.finish = "Ctrl-C"
        print(flush=True)
        out.seconds = time.perf_counter() - began
        print_counts(out)
        said = [*asked, {"role": "assistant", "content": out.text}]


def _line() -> str | None:
    """Return the next typed line; None at the end."""
    try:
        typed = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        screen.print()
        return None
    return None if typed == "/quit" else typed
