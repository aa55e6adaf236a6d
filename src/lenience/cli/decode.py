"""The commands that decode: `demo`, `generate` and `chat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lenience.cli.choices import Models, expected_tokens, is_run, known_run, models_of
from lenience.cli.console import loading, print_json, screen
from lenience.cli.options import (
    GenerateFlags,
    Json,
    PromptFlags,
    check_limit,
    decoder_of,
    given,
    needs_draft,
)
from lenience.cli.prompts import needed, prompt_of
from lenience.cli.servers import Servers, served_answers
from lenience.cli.steps import answer
from lenience.cli.tables import print_answer, print_counts, print_profile
from lenience.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lenience.cli.prompts import GivenPrompt
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair


def generate(
    prompt: str | None = None,
    /,
    *,
    prompts: PromptFlags | None = None,
    run: Path | None = None,
    flags: GenerateFlags | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Answer one prompt or many, with a pair of models or with servers (--reference).

    Parameters
    ----------
    prompt
        Prompt text, @FILE for the text of a file, or - for standard input (the default). On a
        terminal, the default with the built-in pair is a problem from its task.
    run
        Run folder whose models are used unless flags name others. certified:RUN implies it.
    """
    options = given(flags)
    decoder = decoder_of(options)
    prompts = prompts or PromptFlags()
    many = prompts.many(prompt)
    given_prompt = None if many else prompt_of(prompt, prompts.messages)
    if prompts.servers.named:
        models = models or Models()
        models.check_engine(has_servers=True)
        own = {"run": run, "show": prompts.show, "profile": prompts.profile}
        for name, value in own.items():
            if value:
                raise InputError(f"--{name}: cannot be combined with --reference")
        asked = many or [("prompt", needed(given_prompt))]
        _ask(prompts.servers, asked, options, models.system, json=json)
        return
    models = models_for(options, run, models)
    pair = models.load(
        needs_draft=needs_draft(decoder), tokens=len(many) * expected_tokens(options)
    )
    if many:
        _answer_many(pair, many, options, prompts.batch_size, json=json)
        return
    content = _one_of_its_problems(pair) if given_prompt is None else given_prompt
    out, measured = answer(pair, content, options, prompts.profile)
    if prompts.show or not json:
        print_answer(pair, out, prompts.show)
    print_counts(out, picked=decoder.window == "auto" and not decoder.alone)
    if measured:
        print_profile(measured)
    if json:
        whole = _as_json(out, content)
        if measured:
            whole["profile"] = {"cycles": measured.cycles, "seconds": measured.seconds}
        print_json(whole)


def models_for(
    options: Mapping[str, Any], run: Path | None, models: Models | None
) -> Models:
    """Return the named models, or else those of `run`, or of the run in a rule "certified:RUN"."""
    from lenience.certification.certificate import is_certified, run_of

    models = models or Models()
    if run is not None:
        return models_of(known_run(run), models)
    if is_certified(options.get("rule")) and is_run(run_of(options["rule"])):
        return models_of(run_of(options["rule"]), models)
    return models


def _answer_many(
    pair: Pair,
    asked: list[GivenPrompt],
    options: Mapping[str, Any],
    batch_size: int,
    *,
    json: bool,
) -> None:
    """Print the answers to many prompts, in order."""
    from lenience.cli.steps import answers

    for (id, prompt), out in zip(asked, answers(pair, asked, options, batch_size)):
        if json:
            print_json({"id": id, **_as_json(out, prompt)})
        else:
            print(f"── {id}\n{out.text}", flush=True)


def _ask(
    servers: Servers,
    asked: list[GivenPrompt],
    options: Mapping[str, Any],
    system: str | None,
    *,
    json: bool,
) -> None:
    """Print each server's answers, and whether a candidate's text equals the reference's."""
    for name in ("rule", "window"):
        if name in options:
            raise InputError(
                f"--{name}: is the server's own with --reference; set it there, or in body="
            )
    pair: Any = servers.pair(system)
    answers = served_answers(pair, [prompt for _, prompt in asked], options)
    for (id, prompt), outs in zip(asked, answers):
        reference = outs[0][1]
        for endpoint, out in outs:
            is_same = out.text == reference.text
            if json:
                whole = _as_json(out, prompt) | {"endpoint": endpoint.name}
                print_json({"id": id, **whole, "same_text": is_same})
                continue
            speed = len(out.tokens) / out.seconds
            head = f"── {endpoint.name}, {id}: {len(out.tokens)} tokens, {speed:.0f} tokens/s"
            same = is_same and out is not reference
            print(f"{head}\n{'the same text' if same else out.text}", flush=True)
    servers.say_used(pair)


def _as_json(out: Generation, prompt: Any) -> dict[str, Any]:
    trace = [[entry.token, entry.origin, entry.score] for entry in out.trace]
    whole = {"prompt": prompt, **vars(out), "tokens_per_pass": out.tokens_per_pass}
    return whole | {"trace": trace}


def _one_of_its_problems(pair: Pair) -> str:
    """Return a problem of the built-in task, the default prompt. Raises InputError for other
    pairs."""
    if pair.name != "built-in":
        needed(None)
    from lenience.tasks import WordMath

    prompt = str(next(iter(WordMath().samples("test"))).prompt)
    said = "[dim]no prompt given; one of wordmath's problems:[/]"
    screen.print(f"{said} {prompt}", highlight=False)
    return prompt


def chat(
    *,
    run: Path | None = None,
    flags: GenerateFlags | None = None,
    models: Models | None = None,
) -> None:
    """Answer prompts as they are typed, with the models kept loaded.

    Parameters
    ----------
    run
        Run folder whose models are used unless flags name others. certified:RUN implies it.
    """
    from lenience.cli.prompts import chat

    options = given(flags)
    decoder = decoder_of(options)
    models = models_for(options, run, models)
    models.refuse_vllm("chat")
    chat(models.load(needs_draft=needs_draft(decoder)), options)


def demo(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Path = Path("demo"),
    fresh: int = 4,
    limit: int = 30,
    json: Json = False,
) -> None:
    """Run every step on the built-in pair: a live race, mining, training a judge, tuning,
    certifying and comparing. Takes about two minutes and writes report.html.

    Parameters
    ----------
    quick
        Show only the live race (about 30 s) and write nothing.
    out
        Folder for the run (OUT/run) and the report.
    fresh
        Number of samples to mine, besides those that come with the pair.
    limit
        Number of held-out problems to compare on.
    """
    check_limit(limit)
    if fresh < 0:
        raise InputError(f"--fresh {fresh}: must be 0 or more")
    with loading():
        from lenience.cli.demo import show_race, tell
    figures = {"live": show_race()[1]} if quick else tell(out, fresh, limit)
    if json:
        print_json(figures)
