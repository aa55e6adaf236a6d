"""The command line: a thin table of commands. torch is imported by the commands that need it, not
by this module."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

import cyclopts
from cyclopts import App, Group, Parameter

from lenience.cli.console import loading, say, screen
from lenience.cli.fit_options import FitFlags
from lenience.cli.named import (
    SETTINGS,
    Models,
    TaskChoice,
    choice_of,
    crew_of,
    fitting,
    is_run,
    known_run,
    left_out,
    mined_with,
    models_of,
    remember,
)
from lenience.cli.options import (
    AuditFlags,
    CertifyDecoding,
    CertifyFlags,
    CompareDecoding,
    CompareFlags,
    Flag,
    GenerateFlags,
    Json,
    MineFlags,
    PromptFlags,
    TuneFlags,
    given,
)
from lenience.cli.prompts import STDIN, prompt_of
from lenience.cli.steps import (
    answer,
    audit_run,
    build_datastore,
    certify_run,
    compare_run,
    curve_run,
    fit_annotated,
    fit_drafter,
    fit_run,
    fit_tree,
    forecast_run,
    mine_run,
    plan_run,
    search_layers,
    tune_run,
)
from lenience.cli.tables import (
    print_answer,
    print_counts,
    print_curve,
    print_drafter,
    print_grades,
    print_mined,
    print_profile,
    print_skipped,
    print_thresholds,
    print_trees,
)
from lenience.core.errors import InputError, RunError, first_line
from lenience.core.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lenience.cli.prompts import Asked
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.tasks import Task

F = TypeVar("F", bound="Callable[..., None]")
app = App(
    name="lenience",
    help="Speculative decoding that learns which draft tokens do not matter for your task.",
    version=VERSION,
    default_parameter=Parameter(negative_iterable=()),
)
EXAMPLES = {
    "demo": "lenience demo --out demo",
    "generate": 'lenience generate "…" --rule certified:run --show',
    "chat": "lenience chat --target org/target --draft org/draft",
    "init": "lenience init run --target org/target --draft org/draft --task rows.jsonl "
    "--answer number-after:####",
    "mine": "lenience mine --out run --limit 1000 --target org/target --draft org/draft "
    "--task rows.jsonl --answer number-after:####",
    "fit": "lenience fit run --head mlp --ahead 12",
    "datastore": "lenience datastore corpus.jsonl --out store --target org/target",
    "compare": "lenience compare --run run --rule exact --rule judge:run/judge@0.99 --out report",
    "grade": "lenience grade report --take grades.json",
    "certify": "lenience certify run --max-drop 0.01",
    "tune": "lenience tune run --max-drop 0.01",
    "audit": "lenience audit run live.jsonl --share 0.05",
    "push": "lenience push run/judge org/name --license apache-2.0",
}
"""One of each command, in the order of use."""
GROUPS = {
    Group("Decode", sort_key=1): ("demo", "generate", "chat"),
    Group("Learn a judge", sort_key=2): ("init", "mine", "fit", "datastore"),
    Group("Compare and certify", sort_key=3): ("compare", "grade", "certify", "tune", "audit"),
    Group("Give to others", sort_key=4): ("push",),
}
"""Of commands."""
MANY = 10_000
"""Samples, or tokens, where it is not known how many: it pays to export the models."""
USED, CONTINUED = 0.5, 20
"""How much of its length limit an answer takes, and how many times a mined one is written."""


def command(function: F) -> F:
    """Make a function a command, with its place and its example."""
    name = function.__name__
    place, example = list(EXAMPLES).index(name), f"Example: {EXAMPLES[name]}"
    group = next(group for group, names in GROUPS.items() if name in names)
    app.command(function, group=group, sort_key=place, help_epilogue=example)
    return function


@command
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
    """Answer a prompt, or many.

    Parameters
    ----------
    prompt
        The prompt, @FILE for a file's text, or - for standard input, which is also read where there
        is none; for the built-in pair at a terminal, one of its task's problems.
    run
        A run folder whose models are taken where no flag names others; that of a rule certified:RUN
        is taken anyway.
    """
    options = given(flags)
    drafts = _check_specs(options)
    prompts = prompts or PromptFlags()
    many = prompts.many(prompt)
    one = None if many else prompt_of(prompt, prompts.messages)
    models = _models_for(options, run, models)
    pair = models.load(needs_draft=_needs_draft(options), tokens=len(many) * _length(options))
    if many:
        _answer_many(pair, many, options, prompts.batch_size, json=json)
        return
    asked = _one_of_its_problems(pair) if one is None else one
    out, measured = answer(pair, asked, options, prompts.profile)
    if prompts.show or not json:
        print_answer(pair, out, prompts.show)
    print_counts(out, picked=options.get("window") == "auto" and drafts)
    if measured:
        print_profile(measured)
    if json:
        whole = _as_json(out, asked)
        if measured:
            whole["profile"] = {"cycles": measured.cycles, "seconds": measured.seconds}
        _print_json(whole)


@command
def chat(
    *,
    run: Path | None = None,
    flags: GenerateFlags | None = None,
    models: Models | None = None,
) -> None:
    """Answer line by line what is typed, the models staying loaded.

    Parameters
    ----------
    run
        A run folder whose models are taken where no flag names others; that of a rule certified:RUN
        is taken anyway.
    """
    from lenience.cli.prompts import chat

    options = given(flags)
    _check_specs(options)
    models = _models_for(options, run, models)
    models.refuse_vllm("chat")
    chat(models.load(needs_draft=_needs_draft(options)), options)


def _models_for(options: Mapping[str, Any], run: Path | None, models: Models | None) -> Models:
    """The models that are named, or else those of a run or of the run that a rule is certified
    in."""
    from lenience.decoding.certified import is_certified, run_of

    models = models or Models()
    if run is not None:
        return models_of(known_run(run), models)
    if is_certified(options.get("rule")) and is_run(run_of(options["rule"])):
        return models_of(run_of(options["rule"]), models)
    return models


def _answer_many(
    pair: Pair, asked: list[Asked], options: Mapping[str, Any], batch_size: int, *, json: bool
) -> None:
    """Print the answers to many prompts, each when all before it are there."""
    from lenience.cli.steps import answers

    for (id, prompt), out in zip(asked, answers(pair, asked, options, batch_size)):
        if json:
            _print_json({"id": id, **_as_json(out, prompt)})
        else:
            print(f"── {id}\n{out.text}", flush=True)


def _as_json(out: Generation, prompt: Any) -> dict[str, Any]:
    trace = [[entry.token, entry.origin, entry.score] for entry in out.trace]
    whole = {"prompt": prompt, **vars(out), "tokens_per_pass": out.tokens_per_pass}
    return whole | {"trace": trace}


def _check_specs(options: Mapping[str, Any]) -> bool:
    """Raise InputError for what is wrong with options before the models are loaded; says whether
    anything is drafted."""
    from lenience.decoding.options import Decoding
    from lenience.drafting.registry import parse_drafter
    from lenience.drafting.stops import parse_stop
    from lenience.drafting.trees import parse_tree
    from lenience.rules.registry import BASELINES, parse_rule

    decoding = Decoding.of(_resolved(options))
    parse_stop(decoding.stop)
    parse_drafter(decoding.drafter)
    parse_tree(decoding.tree)
    if decoding.rule in BASELINES:
        return False
    parse_rule(decoding.rule)
    return True


def _resolved(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with what "certified:RUN" stands for in its place."""
    from lenience.decoding.certified import is_certified, resolve

    if not is_certified(options.get("rule")):
        return options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say is said when it decodes
        return resolve(options["rule"], options)[0]


def _needs_draft(options: Mapping[str, Any]) -> bool:
    """Whether a draft model is asked for anything."""
    from lenience.drafting.registry import parse_drafter

    options = _resolved(options)
    if options.get("rule") in ("target", "draft"):
        return options["rule"] == "draft"
    return options.get("window") != 0 and parse_drafter(options.get("drafter", "model")).needs_draft


def _one_of_its_problems(pair: Pair) -> str:
    """What the built-in pair is asked where nothing is."""
    if pair.name != "built-in":
        raise InputError("PROMPT: give a prompt, as an argument or on standard input")
    from lenience.tasks import WordMath

    prompt = str(next(iter(WordMath().samples("test"))).prompt)
    said = "[dim]no prompt given; one of wordmath's problems:[/]"
    screen.print(f"{said} {prompt}", highlight=False)
    return prompt


@command
def init(run: Path, /, *, choice: TaskChoice | None = None, models: Models | None = None) -> None:
    """Note a run's models and task in RUN/lenience.toml, so that no other command on it need be
    told; mine does so too.

    Parameters
    ----------
    run
        The run folder.
    """
    settings = run / SETTINGS
    if settings.exists():
        raise InputError(f"{settings}: is there already; edit it, or name another folder")
    choice = choice_of(run, choice or TaskChoice())
    choice.load()
    remember(run, models_of(run, models), choice)
    say(f"{settings} is written; next: lenience mine --out {run}")


@command
def mine(
    *,
    out: Path,
    flags: MineFlags | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Search a task's training samples for important tokens; started again, it goes on where it
    stopped.

    Parameters
    ----------
    out
        The run folder.
    """
    config = (flags or MineFlags()).config()
    _check_limit(config.limit)
    choice = choice_of(out, choice or TaskChoice())
    models = models_of(out, models)
    task = choice.load()
    limit, length = config.limit or MANY, config.decoding(task).max_new_tokens
    pair = models.load(tokens=limit * length * USED * CONTINUED)
    if not is_run(out):
        remember(out, models, choice)
    with fitting(pair, task, choice) as fits:
        crew = crew_of(flags or MineFlags(), models, choice)
        counts = mine_run(pair, fits, out, config, crew)
    remember(out, models, choice)
    print_mined(counts, task)
    whole: dict[str, Any] = {"run": str(out), **asdict(counts)}
    if flags and flags.plan:
        whole["plan"] = asdict(forecast_run(out, flags.plan))
    elif counts.abstained < counts.mismatches:
        say(f"next: lenience fit {quote(str(out))}")
    if json:
        _print_json(whole)


@command
def fit(run: Path, /, *, flags: FitFlags | None = None, json: Json = False) -> None:
    """Fit a judge to a run's journal and save it in RUN/judge; a stop condition for the drafter, in
    RUN/stop or RUN/gate; a drafter, in RUN/medusa, RUN/blockwise, RUN/eagle or RUN/model; or a plan
    of trees, in RUN/tree.json.

    Parameters
    ----------
    run
        The run folder; or, with --from annotated, a JSONL file of question, correct, wrong (two
        answers) and error (of the wrong one, the characters [begin, end] that are wrong), whose
        judge is saved in RUN without .jsonl, in judge/.
    """
    flags = flags or FitFlags()
    if flags.drafter == "skip":
        return _search_layers(run, flags, json)
    if flags.drafter is not None:
        return _fit_drafter(run, flags, json)
    if flags.tree:
        return _fit_tree(run, flags, json)
    plan = flags.plan(run)
    if flags.annotated:
        from lenience.mining.annotated import read_annotated

        rows = read_annotated(run)  # what is wrong is told before the models are loaded
        pair = Models(flags.target, flags.draft, None, flags.device).load()
        fitted = fit_annotated(pair, rows, plan)
    else:
        mined_with(run)  # raises where nothing is mined
        models = models_of(run, Models(flags.target, flags.draft, None, flags.device))
        pair = models.load(tokens=MANY if flags.gate else 0)
        plan = replace(plan, without=left_out(pair, run, flags.fold))
        if flags.curve:
            return _print_curve(curve_run(pair, run, plan), json)
        fitted = fit_run(pair, run, plan)
    print_thresholds(fitted, plan.out)
    if json:
        head = {flags.role: str(plan.out), "head": plan.config.kind}
        _print_json({**head, "threshold": fitted.threshold, **fitted.metrics})


def _print_curve(rows: list[dict[str, Any]], json: bool) -> None:
    print_curve(rows)
    if json:
        _print_json({"curve": rows})


def _fit_tree(run: Path, flags: FitFlags, json: bool) -> None:
    drawn = flags.drawn()
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, None, flags.device))
    found = fit_tree(models.load(tokens=MANY), run, flags.with_ or "model", drawn)
    planned = print_trees(found, run / "tree.json")
    if json:
        _print_json({"drafter": found.drafter, "shares": found.shares, "trees": planned})


def _search_layers(run: Path, flags: FitFlags, json: bool) -> None:
    flags.check_skip()
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, None, flags.device))
    found = search_layers(models.load(needs_draft=False), run)
    best = print_skipped(found)
    if json:
        _print_json({"drafter": best, "skipped": [asdict(one) for one in found]})


def _fit_drafter(run: Path, flags: FitFlags, json: bool) -> None:
    plan = flags.drafter_plan(run)
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, None, flags.device))
    fitted = fit_drafter(models.load(tokens=MANY), run, plan)
    print_drafter(plan.kind, fitted.metrics, plan.out)
    if json:
        used_as = {"drafter": plan.kind if plan.kind == "model" else f"{plan.kind}:{plan.out}"}
        if plan.kind == "model":
            used_as["draft"] = str(plan.out)
        if plan.tune_target:
            used_as["target"] = str(plan.out / "target")
        _print_json({**used_as, **fitted.metrics})


@command
def datastore(
    corpus: tuple[Path, ...],
    /,
    *,
    out: Path,
    field: str = "text",
    target: str | None = None,
    json: Json = False,
) -> None:
    """Build what --drafter datastore:OUT looks up in, from a corpus.

    Parameters
    ----------
    corpus
        Files: .jsonl, perhaps .jsonl.gz, of which each row is a document; any other is one.
    out
        The folder to write.
    field
        Where a row has its text.
    target
        Whose tokenizer is taken; by default the built-in target's.
    """
    store = build_datastore(corpus, out, field, target)
    say(
        f"{store.about['tokens']:,} tokens of {store.about['documents']:,} documents; use it as "
        f"--drafter datastore:{out}"
    )
    if json:
        _print_json({"drafter": f"datastore:{out}", **store.about})


@command
def certify(
    run: Path,
    /,
    *,
    flags: CertifyFlags | None = None,
    decoding: CertifyDecoding | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Find the most lenient setting of a rule whose loss of quality is at most --max-drop, with a
    confidence; started again, it goes on where it stopped.

    Parameters
    ----------
    run
        The run folder; it records which prompts have been used for what, and none is used twice.
    """
    from lenience.tasks import take

    flags = flags or CertifyFlags()
    _check_limit(flags.limit)
    config = flags.config(run, given(decoding))
    choice = choice_of(run, choice or TaskChoice())
    task = choice.load()
    needs_draft = _needs_draft(given(decoding))
    if config.split not in ("train", "test"):
        take(task, config.split, 1)  # raises where there is none, before the models are loaded
    answers = flags.pilot if flags.plan else config.num_prompts()
    tokens = 2 * answers * _length(config.options, task)
    pair = models_of(run, models).load(tokens, needs_draft)
    with fitting(pair, task, choice) as fits:
        if flags.plan:
            outcome = plan_run(pair, fits, run, config, flags.pilot).to_json()
        else:
            outcome = certify_run(pair, fits, run, config).to_json()
    if json:
        _print_json({"run": str(run), **outcome})


@command
def tune(
    run: Path,
    /,
    *,
    flags: TuneFlags | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Find what decodes fastest on this machine at a loss of at most --max-drop: settings of a
    rule, windows, stops and drafters race on fresh prompts, and the fastest that passes is
    certified, strict decoding included. certified:RUN then decodes with it.

    Parameters
    ----------
    run
        The run folder; it records which prompts have been used for what, and none is used twice.
    """
    flags = flags or TuneFlags()
    _check_limit(flags.limit)
    config = flags.config(run)
    choice = choice_of(run, choice or TaskChoice())
    task = choice.load()
    models = models_of(run, models)
    models.refuse_vllm("tune")
    answers = config.question.num_prompts()
    pair = models.load(2 * answers * _length(config.question.options, task))
    with fitting(pair, task, choice) as fits:
        tuned = tune_run(pair, fits, run, config)
    if json:
        speeds = tuned.speeds and tuned.speeds.to_json()
        told = {"run": str(run), "races": tuned.races.to_json(), "speeds": speeds}
        _print_json({**told, **tuned.certificate.to_json()})


@command
def audit(
    run: Path,
    prompts: Path,
    /,
    *,
    flags: AuditFlags | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Answer a small random share of prompts both with a run's certified rule and with the target
    alone, and say whether the certificate still holds. RUN/audit.jsonl keeps what was seen.

    Parameters
    ----------
    run
        The run folder with the certificate.
    prompts
        A JSONL file of prompt or messages and, if known, reference.
    """
    from lenience.certification.audit import AuditConfig, read_prompts
    from lenience.decoding.certified import read_certificate
    from lenience.tasks import JsonlTask
    from lenience.tasks.rows import USUAL_FIELDS

    flags = flags or AuditFlags()
    # what is wrong is told before the models are loaded
    task = choice_of(run, choice or TaskChoice()).load()
    rows = read_prompts(prompts, task.fields if isinstance(task, JsonlTask) else USUAL_FIELDS)
    read_certificate(run)
    config = AuditConfig(share=flags.share, confidence=flags.confidence, seed=flags.seed)
    config.check()
    pair = models_of(run, models).load(len(rows) * _length({}, task))
    state = audit_run(pair, task, run, rows, config, batch_size=flags.batch_size)
    if json:
        _print_json({"run": str(run), **vars(state)})


@command
def compare(
    *,
    run: Path | None = None,
    flags: CompareFlags | None = None,
    decoding: CompareDecoding | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Compare acceptance rules, or whole decoders, on a task's test samples: quality and speed,
    each with its interval.

    Parameters
    ----------
    run
        A run folder whose models and task are taken where no flag names others.
    """
    flags = flags or CompareFlags()
    config = flags.config(given(decoding))
    choice, models = choice or TaskChoice(), models or Models()
    if run is not None:
        choice, models = choice_of(known_run(run), choice), models_of(run, models)
    task = choice.load()
    needs_draft = any(_needs_draft(vars(one)) for one in config.decodings())
    answers = len(config.decodings()) * (config.limit or MANY)
    pair = models.load(answers * _length(config.options, task), needs_draft)
    with fitting(pair, task, choice) as fits:
        frontier = compare_run(pair, fits, config, flags.out)
    if flags.out is not None:
        from lenience.evaluation.pages import write_report
        from lenience.evaluation.plots import no_figures

        report = flags.out / "report.html"
        write_report(report, frontier)
        say(f"report: {report}   {no_figures()}".rstrip())
    if json:
        whole = frontier.to_json()
        _print_json({key: value for key, value in whole.items() if key != "examples"})


@command
def grade(
    folder: Path,
    /,
    *,
    take: Path | None = None,
    rule: tuple[str, ...] = (),
    limit: int = 50,
    json: Json = False,
) -> None:
    """Let people grade a comparison: write a page of blinded pairs of answers, and take the file
    that it saves.

    Parameters
    ----------
    folder
        Where compare --out put the comparison.
    take
        The file that the page saved; its grades go into the folder's frontier.json and report.html.
    rule
        Whose answers are shown beside the target's; by default of all but the strict rule.
    limit
        How many pairs of each.
    """
    from lenience.evaluation.human import take_grades, write_page

    _check_limit(limit)
    if take is None:
        page = write_page(folder, rule, limit)
        say(f"{page.pairs} pairs, {page.alike} more are the same text: open {page.path}")
        if json:
            _print_json({"page": str(page.path), "pairs": page.pairs, "alike": page.alike})
        return
    found = take_grades(folder, take)
    print_grades(found)
    if json:
        _print_json({name: grades.to_json() for name, grades in found.items()})


@command
def push(
    head: Path,
    name: str,
    /,
    *,
    license: str | None = None,
    private: Flag = False,
    json: Json = False,
) -> None:
    """Put a fitted head on the Hugging Face Hub, with a card that says what it is.

    Parameters
    ----------
    head
        The head's folder, such as RUN/judge.
    name
        Its name there, org/name; others use it as --rule judge:hf:org/name@T.
    license
        For the card, such as apache-2.0.
    private
        Where there is no such repository yet, make a private one.
    """
    from lenience.evaluation.cards import push

    place = push(head, name, license, private)
    say(f"{head} is at {place}")
    if json:
        _print_json({"head": f"hf:{name}", "at": place})


@command
def demo(*, out: Path = Path("demo"), fresh: int = 8, limit: int = 60, json: Json = False) -> None:
    """The whole story on the built-in pair: mine, fit, tune, certify, compare, report.html.

    Parameters
    ----------
    out
        Where to put the run folder (OUT/run) and the report.
    fresh
        How many samples to mine live, on top of those that come with the pair.
    limit
        How many held-out problems to compare on.
    """
    _check_limit(limit)
    if fresh < 0:
        raise InputError(f"--fresh {fresh}: must be 0 or more")
    with loading():
        from lenience.cli.demo import tell
    figures = tell(out, fresh, limit)
    if json:
        _print_json(figures)


def _length(options: Mapping[str, Any], task: Task | None = None) -> float:
    """About how many tokens an answer takes."""
    usual = 256 if task is None else task.max_new_tokens
    return USED * (options.get("max_new_tokens") or usual)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")


def _print_json(value: dict[str, Any]) -> None:
    print(jsonlib.dumps(value), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 1 the run failed, 2 the arguments or the input are
    wrong."""
    warnings.formatwarning = lambda message, *_, **__: f"lenience: {message}\n"
    given = sys.argv[1:] if argv is None else argv
    given = [STDIN if one == "-" else one for one in given]  # which would be taken for a flag
    try:
        command, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False)
        command(*bound.args, **bound.kwargs)
    except (InputError, cyclopts.CycloptsError) as error:
        _fail(first_line(error), 2)
    except KeyboardInterrupt:
        _fail("stopped; finished samples are kept, the same command goes on from them", 1)
    except RunError as error:
        _fail(first_line(error), 1)
    except Exception as error:
        if os.environ.get("LENIENCE_DEBUG"):
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        _fail(f"{what} (LENIENCE_DEBUG=1 shows where)", 1)


def _fail(message: str, status: int) -> None:
    print(f"lenience: {message}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
