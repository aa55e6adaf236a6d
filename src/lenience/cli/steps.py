"""Steps of a run with progress bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from lenience.cli.console import (
    counted,
    duration,
    progress_bars,
    say,
    screen,
    with_bars,
)
from lenience.cli.tables import (
    gained,
    planned,
    print_audit,
    print_certificate,
    print_passed,
    print_plan,
    print_races,
    print_table,
)

if TYPE_CHECKING:
    from lenience.certification.audit import AuditConfig, LivePrompt, State
    from lenience.certification.certificate import Certificate
    from lenience.certification.certify import Plan
    from lenience.certification.question import CertifyConfig
    from lenience.certification.tune import TuneConfig, Tuned
    from lenience.core.profile import Profile
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.drafting.datastore import Store
    from lenience.drafting.trees.planning import Acceptance
    from lenience.evaluation.compare import CompareConfig
    from lenience.evaluation.table import Frontier
    from lenience.mining.crew import Crew
    from lenience.mining.forecast import Forecast
    from lenience.mining.search import MineConfig, MinedCounts
    from lenience.models.prompts import Prompt
    from lenience.tasks import Task
    from lenience.training.acceptance import TreeSampling
    from lenience.training.skipping import Skipped


def compile_pair(pair: Pair, wanted: bool | None, tokens: float) -> None:
    """Run the models through exported graphs if `wanted`. If `wanted` is None, do so if the graphs
    are in the cache, or can be made in less time than they save on this number of new `tokens`."""
    from lenience.models.compile import (
        NEEDS_ONNX,
        compile_model,
        export_seconds,
        refuses,
        saved_seconds,
    )

    models = list(pair.models.values())
    refused = list(map(refuses, models))
    fits = not any(refused) and all(lm.device.type == "cpu" for lm in models)
    if wanted is False:
        return
    if not wanted and not (tokens and fits):
        if tokens and NEEDS_ONNX in refused:
            say(f"decoding runs in PyTorch: {NEEDS_ONNX}")
        pair.compile(export=False)
        return
    takes = export_seconds(models) if fits else 0.0
    saves = 0.0 if wanted or not takes else saved_seconds(models) * tokens
    if not wanted and takes > saves:
        say(
            "decoding runs in PyTorch: exporting the models takes about "
            f"{duration(takes)}, "
            f"more than it would save, about {duration(saves)} (--compile does it "
            "anyway)"
        )
        pair.compile(export=False)
        return
    if takes:
        say(f"exporting the models for ONNX Runtime, once, about {duration(takes)}")
    with progress_bars() as show:
        for done, lm in enumerate(models):
            show("exporting" if takes else "loading graphs", done, len(models))
            compile_model(lm)
        show("exporting" if takes else "loading graphs", len(models), len(models))


def mine_run(
    pair: Pair, task: Task, out: Path, config: MineConfig, crew: Crew | None = None
) -> MinedCounts:
    from lenience.mining.search import mine

    try:
        return with_bars(mine, pair, task, out, config, crew=crew)
    finally:
        if crew is not None:
            crew.close()


def forecast_run(out: Path, labels: int) -> Forecast:
    """Estimate and print the cost of mining `labels` important mismatches."""
    from lenience.mining.forecast import forecast
    from lenience.runs.journal import Journal
    from lenience.runs.record import mined_samples

    found = forecast(list(mined_samples(Journal(out / "journal.jsonl"))), labels)
    say(planned(found, quote(str(out))))
    return found


def build_datastore(
    corpus: Sequence[Path], out: Path, field: str, target: str | None
) -> Store:
    from lenience.core.files import EMBEDDED
    from lenience.core.identity import tokenizer_fingerprint
    from lenience.drafting.corpus import documents
    from lenience.drafting.datastore import build_store
    from lenience.models.lm import load_tokenizer

    name = target or "built-in target"
    tokenizer = load_tokenizer(target or str(EMBEDDED / "target"))
    with progress_bars() as show:
        found = documents(corpus, tokenizer, name, field, show)
        return build_store(found, tokenizer_fingerprint(tokenizer), out)


def fit_tree(
    pair: Pair, run: Path, drafter: str, drawn: TreeSampling | None
) -> Acceptance:
    from lenience.decoding.decoder import Decoder
    from lenience.training.acceptance import fit_tree

    return with_bars(fit_tree, pair, run, Decoder.of(drafter=drafter).drafter, drawn)


def search_layers(pair: Pair, run: Path) -> list[Skipped]:
    from lenience.training.features import check_models, mined_samples
    from lenience.training.skipping import search_layers

    check_models(pair, run)
    return with_bars(search_layers, pair, mined_samples(run))


def certify_run(
    pair: Pair, task: Task, run: Path, config: CertifyConfig
) -> Certificate:
    """Certify, and print the result."""
    from lenience.certification.certify import certify

    certificate = with_bars(certify, pair, task, run, config)
    print_certificate(run, certificate)
    return certificate


def tune_run(pair: Pair, task: Task, run: Path, config: TuneConfig) -> Tuned:
    """Tune, and print the races, the certificate and the gain."""
    from lenience.certification.tune import tune

    tuned = with_bars(tune, pair, task, run, config)
    print_races(tuned.races)
    print_certificate(run, tuned.certificate)
    if tuned.speeds:
        print_passed(tuned.speeds.passed, tuned.speeds.batch_size)
    say(gained(tuned))
    return tuned


def plan_run(
    pair: Pair, task: Task, run: Path, config: CertifyConfig, pilot: int
) -> Plan:
    """Plan certificates with a pilot of this number of prompts, and print the estimate."""
    from lenience.certification.certify import plan

    planned = with_bars(plan, pair, task, run, config, pilot=pilot)
    print_plan(planned)
    return planned


def audit_run(
    pair: Pair,
    task: Task,
    run: Path,
    prompts: Sequence[LivePrompt],
    config: AuditConfig,
    batch_size: int,
) -> State:
    """Answer prompts with a certified rule, audit the answers and print the state."""
    from lenience.certification.audit import Audit, audit

    watch = Audit(run, pair, task, config)
    again = with_bars(audit, watch, prompts, batch_size)
    state = watch.state()
    print_audit(watch, state, again)
    return state


def compare_run(
    pair: Pair, task: Task, config: CompareConfig, out: Path | None
) -> Frontier:
    """Print the estimated time, compare, and print the table."""
    from lenience.evaluation.compare import Comparison

    comparison = with_bars(Comparison, pair, task, config)
    with comparison.folder(out) as folder:
        with screen.status("estimating"):
            estimate = comparison.estimate(folder)
        answers = counted(estimate.answers, "answer")
        say(f"{answers} to decode, about {duration(estimate.seconds)}")
        tuned = len(comparison.tuning_samples)
        if tuned:
            say(
                f"windows are chosen on separate prompts: the last {tuned} of the "
                "training split"
            )
        frontier = with_bars(comparison.carry_out, folder)
    print_table(frontier)
    return frontier


def answers(
    pair: Pair,
    asked: Sequence[tuple[str, Prompt]],
    options: Mapping[str, Any],
    batch_size: int,
) -> Iterator[Generation]:
    """Yield the answers to many prompts, in their order."""
    with progress_bars() as show:
        show("answering", 0, len(asked))
        prompts = [prompt for _, prompt in asked]
        given = 0
        waiting: dict[int, Generation] = {}
        answered = pair.as_completed(prompts, batch_size=batch_size, **options)
        for done, (number, out) in enumerate(answered, 1):
            waiting[number] = out
            show("answering", done, len(asked))
            while given in waiting:
                yield waiting.pop(given)
                given += 1


def answer(
    pair: Pair, prompt: Prompt, options: Mapping[str, Any], profiled: bool
) -> tuple[Generation, Profile | None]:
    """Return one answer. If `profiled`, answer twice, and return the profile of the second time
    too."""
    if options.get("window") == "auto":
        with screen.status("choosing the window"):
            pair.settle([prompt], **options)
    if not profiled:
        return pair.generate(prompt, **options), None
    from lenience.core.profile import Profile

    with screen.status("warming up"):
        warm = pair.generate(prompt, **options)
    screen.print(f"[dim]warmed up in {warm.seconds:.2f} s[/]")
    profile = Profile()
    return pair.generate(prompt, profile=profile, **options), profile
