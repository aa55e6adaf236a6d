"""The commands that measure: `compare`, `grade`, `certify`, `tune` and `audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lenience.cli.choices import (
    MANY,
    Models,
    TaskChoice,
    choice_of,
    expected_tokens,
    fitting,
    known_run,
    models_of,
    remember,
)
from lenience.cli.console import print_json, say, with_bars
from lenience.cli.options import (
    AuditFlags,
    CertifyDecoding,
    CertifyFlags,
    CompareDecoding,
    CompareFlags,
    Json,
    TuneFlags,
    check_folder,
    check_limit,
    decoder_of,
    given,
    needs_draft,
)
from lenience.cli.servers import STORE, Servers, print_cost_and_noise, print_speeds
from lenience.cli.steps import audit_run, certify_run, compare_run, plan_run, tune_run
from lenience.cli.tables import print_grades
from lenience.core.errors import InputError, RunError
from lenience.core.files import write_json

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.evaluation.compare import CompareConfig
    from lenience.evaluation.table import Frontier, MinedText
    from lenience.integrations.endpoints.pair import ServedPair
    from lenience.tasks import Task


def compare(
    *,
    flags: CompareFlags | None = None,
    decoding: CompareDecoding | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Compare acceptance rules or whole decoders on a task's test samples: quality and speed with
    95 % intervals."""
    flags = flags or CompareFlags()
    servers = flags.servers
    models = models or Models()
    models.check_engine(servers.named)
    config = flags.config(given(decoding))
    if flags.out is not None:
        check_folder(flags.out)
    choice = choice or TaskChoice()
    if flags.run is not None:
        choice = choice_of(known_run(flags.run), choice)
        models = models_of(flags.run, models)
    task = choice.load()
    if servers.named:
        pair = servers.pair(models.system, flags.out and flags.out / STORE)
    else:
        pair = _pair_to_compare(models, config, task)
    with fitting(pair, task, choice) as fits:
        frontier = compare_run(pair, fits, config, flags.out)
    if servers.named:
        speeds = _time_servers(servers, pair, task, config)
        frontier = frontier.model_copy(update={"endpoints": tuple(speeds)})
    if flags.out is not None:
        if flags.run is not None and not servers.named:
            mined = _mined_texts(pair, task, flags.run)
            frontier = frontier.model_copy(update={"mined": mined})
        _write_report(flags.out, frontier)
    if json:
        whole = frontier.to_json()
        left_out = {"examples", "mined"}
        left_out |= set() if servers.named else {"endpoints"}
        print_json({key: whole[key] for key in whole if key not in left_out})


def _write_report(out: Path, frontier: Frontier) -> None:
    from lenience.core.figures import no_figures
    from lenience.evaluation.pages import write_report

    report = out / "report.html"
    write_json(out / "frontier.json", frontier.to_json())
    write_report(report, frontier)
    say(f"report: {report}   {no_figures()}".rstrip())


def _mined_texts(pair: Pair, task: Task, run: Path) -> tuple[MinedText, ...]:
    """Return mined answers for the report; none, with a message, if the run cannot be read."""
    from lenience.evaluation.mined_texts import mined_texts

    try:
        return mined_texts(pair.models, task, run)
    except InputError as error:
        say(f"the report shows no mined answers: {error}")
        return ()


def _pair_to_compare(models: Models, config: CompareConfig, task: Task) -> Pair:
    """Load the pair of a comparison, with a draft if a decoder needs one."""
    drafts = any(map(needs_draft, config.decodings()))
    answers = len(config.decodings()) * (config.limit or MANY)
    return models.load(answers * expected_tokens(config.options, task), drafts)


def _time_servers(
    servers: Servers, pair: Pair, task: Task, config: CompareConfig
) -> list[dict[str, Any]]:
    """Measure and print the speed of servers at the concurrency of --in-flight."""
    from lenience.integrations.endpoints.speed import measure_speeds
    from lenience.runs.answers import for_task
    from lenience.tasks import take

    served = cast("ServedPair", pair)
    samples = take(task, "test", min(config.timed, config.limit or config.timed))
    decoder = for_task(config.shared, config.options, task)
    prompts = [sample.prompt for sample in samples]
    speeds = with_bars(measure_speeds, served, prompts, decoder, rounds=config.repeats)
    print_speeds(speeds)
    servers.say_used(served)
    return [speed.to_json() for speed in speeds]


def grade(
    folder: Path,
    /,
    *,
    take: Path | None = None,
    rule: tuple[str, ...] = (),
    limit: int = 50,
    json: Json = False,
) -> None:
    """Write a page on which people grade blinded pairs of answers, or add the grades saved by that
    page to the report.

    Parameters
    ----------
    folder
        Folder of a comparison (compare --out).
    take
        File of grades that the page saved. The grades are added to frontier.json and report.html.
    rule
        Rules whose answers are graded against the target's. Default: all but the strict rule.
    limit
        Maximum number of pairs per rule.
    """
    from lenience.evaluation.human import take_grades, write_page

    check_limit(limit)
    if take is None:
        page = write_page(folder, rule, limit)
        say(
            f"{page.pairs} pairs, {page.alike} more are the same text: open {page.path}"
        )
        if json:
            print_json(
                {"page": str(page.path), "pairs": page.pairs, "alike": page.alike}
            )
        return
    found = take_grades(folder, take)
    print_grades(found)
    if json:
        print_json({name: grades.to_json() for name, grades in found.items()})


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
    """Certify the most lenient setting of a rule whose loss is at most --max-drop with the given
    confidence. A stopped run resumes.

    Parameters
    ----------
    run
        Run folder. It records the use of every prompt; no prompt is used twice.
    """
    from lenience.tasks import take

    flags = flags or CertifyFlags()
    check_limit(flags.limit)
    servers = flags.servers
    models = models or Models()
    models.check_engine(servers.named)
    config = flags.config(run, given(decoding))
    choice = choice_of(run, choice or TaskChoice())
    task = choice.load()
    if config.split not in ("train", "test"):
        # raises for an unknown split, before the models are loaded
        take(task, config.split, 1)
    answers = flags.pilot if flags.plan else config.num_prompts()
    if servers.named:
        models = models_of(run, models)
        pair = _served(run, flags, models)
        print_cost_and_noise(servers, pair, config, task)
        remember(run, models, choice)
    else:
        drafts = needs_draft(decoder_of(given(decoding)))
        tokens = 2 * answers * expected_tokens(config.options, task)
        pair = models_of(run, models).load(tokens, drafts)
    with fitting(pair, task, choice) as fits:
        if flags.plan:
            outcome = plan_run(pair, fits, run, config, flags.pilot).to_json()
        else:
            outcome = certify_run(pair, fits, run, config).to_json()
    if servers.named:
        servers.say_used(pair)
    if json:
        print_json({"run": str(run), **outcome})
    if flags.fail_if_not_certified and not flags.plan and not outcome["certified"]:
        raise RunError(f"{run}: nothing is certified ({outcome['reason']})")


def _served(run: Path, flags: CertifyFlags, models: Models) -> Pair:
    """Return servers in the role of a pair, whose answers are kept in the run folder."""
    check_folder(run)
    run.mkdir(parents=True, exist_ok=True)
    return flags.servers.pair(models.system, run / STORE, flags.claim)


def tune(
    run: Path,
    /,
    *,
    flags: TuneFlags | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Find and certify the fastest setting on this machine whose loss is at most --max-drop.
    Thresholds, windows, stop conditions and drafters race on fresh prompts; strict decoding takes
    part. Use the result with --rule certified:RUN. With --engine vllm, each window and drafter
    starts an engine.

    Parameters
    ----------
    run
        Run folder. It records the use of every prompt; no prompt is used twice.
    """
    flags = flags or TuneFlags()
    check_limit(flags.limit)
    models = models_of(run, models)
    config = flags.config(run, in_vllm=models.engine == "vllm")
    choice = choice_of(run, choice or TaskChoice())
    task = choice.load()
    answers = config.question.num_prompts()
    tokens = 2 * answers * expected_tokens(config.question.options, task)
    # without a choice of drafters, the draft model races too
    named = config.named_drafters
    drafts = not named or any(drafter.needs_draft for drafter in named)
    pair = models.load(tokens, drafts)
    with fitting(pair, task, choice) as fits:
        tuned = tune_run(pair, fits, run, config)
    if json:
        speeds = tuned.speeds and tuned.speeds.to_json()
        figures = {"run": str(run), "races": tuned.races.to_json(), "speeds": speeds}
        print_json({**figures, **tuned.certificate.to_json()})


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
    """Check a certificate on live prompts: answer a random share of them with the certified rule
    and with the target alone, and report drift. Results are kept in RUN/audit.jsonl.

    Parameters
    ----------
    run
        Run folder with the certificate.
    prompts
        JSONL file with the fields prompt or messages and, if known, reference; or a folder of
        such files.
    """
    from lenience.certification.audit import AuditConfig, read_logs
    from lenience.certification.certificate import read_certificate
    from lenience.tasks import JsonlTask
    from lenience.tasks.rows import USUAL_FIELDS

    flags = flags or AuditFlags()
    # raises for wrong input before the models are loaded
    task = choice_of(run, choice or TaskChoice()).load()
    rows = read_logs(
        prompts, task.fields if isinstance(task, JsonlTask) else USUAL_FIELDS
    )
    certificate = read_certificate(run)
    config = AuditConfig(
        share=flags.share, confidence=flags.confidence, seed=flags.seed
    )
    config.check()
    models = models or Models()
    servers = flags.servers
    models.check_engine(servers.named)
    if servers.named:
        # no store: earlier answers would hide what has changed since
        pair = servers.pair(models_of(run, models).system, claims=flags.claim)
        batch_size = servers.in_flight
    else:
        tokens = len(rows) * expected_tokens({}, task)
        drafts = certificate.holds and needs_draft(certificate.decoder(run))
        pair = models_of(run, models).load(tokens, drafts)
        batch_size = flags.batch_size
    state = audit_run(pair, task, run, rows, config, batch_size=batch_size)
    if servers.named:
        servers.say_used(pair)
    if json:
        print_json({"run": str(run), **vars(state)})
