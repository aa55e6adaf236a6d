"""Prompts on the command line: one in several forms, many from a file, a chat; marks without
colours; a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import PROBLEM, last_json, run, spawn

from lenience.cli.prompts import prompts_in
from lenience.core.errors import RunError
from lenience.core.files import write_json
from lenience.runs.journal import Journal

SHORT = ("--max-new-tokens", 6, "--no-compile")


def test_a_prompt_comes_in_several_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROBLEM + "\n")
    wanted = run("generate", PROBLEM, *SHORT).stdout
    assert len(wanted.split()) > 2
    assert run("generate", "-", *SHORT, stdin=PROBLEM + "\n").stdout == wanted
    assert run("generate", *SHORT, stdin=PROBLEM).stdout == wanted
    assert run("generate", f"@{file}", *SHORT).stdout == wanted


def test_many_prompts_are_answered_in_their_order(tmp_path: Path) -> None:
    from lenience.tasks import WordMath

    texts = [
        str(sample.prompt) for sample, _ in zip(WordMath().samples("test"), range(5))
    ]
    alone = [run("generate", text, *SHORT).stdout.rstrip("\n") for text in texts]
    lines, rows = tmp_path / "prompts.txt", tmp_path / "rows.jsonl"
    lines.write_text("\n".join(texts) + "\n\n")
    rows.write_text(
        "".join(
            json.dumps({"prompt": one, "id": f"p{i}"}) + "\n"
            for i, one in enumerate(texts)
        )
    )
    done = run("generate", "--prompts", rows, "--json", "--batch-size", 2, *SHORT)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["id"] for one in answers] == [f"p{i}" for i in range(5)]
    assert [one["text"] for one in answers] == alone
    shown = run("generate", "--prompts", lines, *SHORT).stdout
    assert shown == "".join(f"── {i}\n{text}\n" for i, text in enumerate(alone, 1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["@nowhere.txt"], "PROMPT nowhere.txt: cannot be read"),
        (["--messages", "nowhere.json"], "--messages nowhere.json: cannot be read"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["a", "--prompts", "x.txt"], "--prompts: replaces PROMPT"),
        (
            ["--prompts", "x.txt", "--show"],
            "cannot be combined with --show or --profile",
        ),
        (
            ["--prompts", "x.txt", "--batch-size", "0"],
            "--batch-size 0: must be 1 or more",
        ),
        (["a", "--messages", "x.json"], "--messages: replaces PROMPT"),
    ],
)
def test_what_is_no_prompt_is_told(arguments: list[str], says: str) -> None:
    done = run("generate", *arguments)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_chat_messages_are_a_prompt_and_a_chat_knows_what_was_said(
    chatting: str, checkpoints, tmp_path: Path
) -> None:
    models = (
        "--target",
        chatting,
        "--draft",
        checkpoints("llama")[1],
        "--dtype",
        "float32",
    )
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "w5"}]))
    first = last_json(run("generate", "--messages", file, "--json", *models, *SHORT))
    assert first["prompt_tokens"] == [1, 5, 2]
    said = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": first["text"]},
    ]
    file.write_text(json.dumps([*said, {"role": "user", "content": "w6"}]))
    second = last_json(run("generate", "--messages", file, "--json", *models, *SHORT))
    alone = last_json(run("generate", "w6", "--json", *models, *SHORT))
    assert second["text"] != alone["text"], (
        "or the test would not see what is forgotten"
    )
    chat = run("chat", *models, *SHORT, stdin="w5\n/help\nw6\n/new\nw6\n")
    assert chat.stdout.splitlines() == [first["text"], second["text"], alone["text"]]
    file.write_text('{"a": 1}')
    assert "holds no chat" in run("generate", "--messages", file, *models).stderr


def test_tokens_are_marked_where_there_are_no_colours() -> None:
    done = run(
        "generate", PROBLEM, "--show", "--rule", "topk:3", "--max-new-tokens", 40
    )
    answer, legend = done.stdout.strip().split("\n\n")
    assert "«draft-lenient»" in legend and "«" in answer and "[" in answer
    plain = run("generate", PROBLEM, "--rule", "topk:3", "--max-new-tokens", 40).stdout
    assert answer.translate(
        str.maketrans("", "", "«»[]()‹›")
    ) == plain.strip().translate(str.maketrans("", "", "()[]"))


def test_a_full_disk_is_told_by_the_file(tmp_path: Path) -> None:
    full = tmp_path / "journal.jsonl"
    full.symlink_to("/dev/full")
    with pytest.raises(
        RunError, match=r"journal\.jsonl: cannot be written \(No space left"
    ):
        Journal(full).write({"id": "a"})
    folder = tmp_path / "file"
    folder.write_text("")
    with pytest.raises(RunError, match=r"file/run\.json: cannot be written"):
        write_json(folder / "run.json", {})


@pytest.mark.parametrize("width", [60, 100])
def test_help_fits_the_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ((), ("generate",), ("certify",), ("mine",)):
        told = spawn(*command, "--help").stdout
        boxes = told.partition("Example:")[0]  # which is one line, to be copied
        assert boxes and max(map(len, boxes.splitlines())) <= width
        assert "--empty-" not in told
    assert "[default: exact]" in " ".join(spawn("generate", "--help").stdout.split())


def test_lines_of_a_text_are_prompts_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\nthird\n")
    assert prompts_in(path) == [("1", "first"), ("3", "third")]
