"""The steps of a run as a person sees them: with a bar and the time left on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from lenience.certification.audit import State
    from lenience.certification.question import Question
    from lenience.core.profile import Profile
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.heads.head import Head, Inputs, Role
    from lenience.mining.annotated import Annotated
    from lenience.models.lm import Prompt
    from lenience.tasks import Task

screen = Console(stderr=True)
STYLES = {
    "draft": "black on bright_blue",
    "draft-lenient": "bold black on bright_green",
    "draft-trusted": "black on bright_yellow",
    "correction": "black on bright_red",
    "bonus": "black on white",
}
"""Of tokens, by where they came from."""


@contextmanager
def loading() -> Iterator[None]:
    """While models load: says so, and keeps transformers from drawing bars of its own."""
    with screen.status("loading the models"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield


def compile_pair(pair: Pair, wanted: bool | None, long: bool) -> None:
    """Read the models through exported graphs, if that is `wanted` or, where None is said, if graphs are in the cache or the
    work is `long` and they can be made."""
    from lenience.models.compile import refuses

    fits = not any(refuses(lm) or lm.device.type != "cpu" for lm in (pair.target, pair.draft))
    if wanted or (wanted is None and long and fits):
        with screen.status("compiling the models"):
            pair.compile()
    elif wanted is None:
        pair.compile(export=False)
    if pair.compiled:
        import torch

        torch.set_num_threads(1)  # leaves the cores to the graphs


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function (what, done, total) that draws a bar with the time left on standard error."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=screen) as bars:
        made: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in made:
                made[what] = bars.add_task(what, total=total)
            bars.update(made[what], completed=done, total=total)

        yield show


def mine_run(pair: Pair, task: Task, out: Path, limit: int | None, **options: Any) -> dict[str, Any]:
    """Mine, and count what the journal holds then."""
    from lenience.mining.search import mine
    from lenience.runs.journal import Journal

    with progress() as show:
        for done, total, _ in mine(pair, task, out, limit=limit, **options):
            show("mining", done, total)
    labels = [m["important"] for record in Journal(out / "journal.jsonl") for m in record["mismatches"]]
    return {
        "samples": sum(1 for _ in Journal(out / "journal.jsonl")),
        "mismatches": len(labels),
        "important": sum(label is True for label in labels),
        "abstained": sum(label is None for label in labels),
    }


def fit_run(pair: Pair, run: Path, inputs: Inputs, out: Path, role: Role = "judge", tau: float = 1.0, **options: Any) -> Head:
    """Compute the hidden states that a head of a role is fitted to, fit it and save it; `tau` is a gate's."""
    from lenience.heads.fitting import fit_head
    from lenience.mining.features import features, load_features

    with progress() as show:
        for done, total in features(pair, run, inputs, role):
            show("hidden states", done, total)
    with screen.status(f"fitting the {role}"):
        x, important, samples = load_features(run, inputs, role, tau)
        head = fit_head(x, important, samples, inputs=inputs, fingerprints=pair.fingerprints, role=role, **options)
    head.metrics |= {"tau": tau} if role == "gate" else {}
    head.save(out)
    return head


def fit_annotated(pair: Pair, rows: list[Annotated], inputs: Inputs, out: Path, **options: Any) -> Head:
    """Fit a judge to answers in which the errors are marked, and save it."""
    from lenience.heads.fitting import fit_head
    from lenience.mining.annotated import collect, states
    from lenience.runs.uses import note_uses

    found = []
    with progress() as show:
        for one in states(pair.target, rows, inputs):
            found.append(one)
            show("hidden states", len(found), len(rows))
    with screen.status("fitting the judge"):
        x, wrong, samples = collect(found)
        known = {part: value for part, value in pair.fingerprints.items() if part != "draft"}
        more = "annotate more answers"
        head = fit_head(x, wrong, samples, inputs=inputs, fingerprints=known, more=more, **options)
    note_uses(out.parent, pair.target, [(row.place, row.question) for row in rows], "fitting", "annotated")
    head.save(out)
    return head


def certify_run(pair: Pair, task: Task, run: Path, question: Question, pilot: int | None = None) -> dict[str, Any]:
    """Certify, or with a `pilot` of so many prompts plan it, with progress, and print what came of it."""
    from lenience.certification.certify import certify, plan

    with progress() as show:
        made = certify(pair, task, run, question, show) if pilot is None else plan(pair, task, run, question, pilot, show)
    if pilot is None:
        print_certificate(run, made)
    else:
        print_plan(made)
    return made


def print_certificate(run: Path, made: dict[str, Any]) -> None:
    from lenience.decoding.certified import read_certificate
    from lenience.evaluation.names import short

    table = Table("setting", title=f"loss ({made['loss']}) at most {made['max_drop']:.2%}, confidence {made['confidence']:.0%}")
    for column in ("prompts", "losses", "bound", "tokens/pass", ""):
        table.add_column(column, justify="right")
    for row in made["tried"]:
        verdict = "passes" if row["passed"] else "given up" if row["hopeless"] else "does not pass"
        table.add_row(escape(short(row)), str(row["n"]), f"{row['losses']:g}", f"{row['upper_bound']:.2%}",
                      f"{row['tokens_per_pass']:.2f}", verdict)  # fmt: skip
    Console(stderr=True, width=max(screen.width, 100)).print(table)
    if made["certified"]:
        screen.print(f"certified: {made['certified']['rule']}, window {made['certified']['window']}; use it as --rule "
                     f"certified:{run}", highlight=False, markup=False)  # fmt: skip
        return
    more = f"; about {made['needed']} prompts would be needed" if made["needed"] else ""
    screen.print(f"nothing is certified: {made['reason']}{more}", highlight=False, markup=False)
    if (now := read_certificate(run))["certified"]:
        screen.print(
            f"the run's earlier certificate, of a loss of at most {now['max_drop']:.2%}, stays: certified:{run} is "
            f"{now['certified']['rule']}", highlight=False, markup=False,
        )  # fmt: skip


def print_plan(made: dict[str, Any]) -> None:
    from lenience.evaluation.names import short

    table = Table("setting", title=f"to bound the loss by {made['max_drop']:.2%} with confidence {made['confidence']:.0%}")
    for column in (f"loss in a pilot of {made['pilot']}", "tokens/pass", "prompts", "target passes", "minutes"):
        table.add_column(column, justify="right")
    for row in made["plan"]:
        cells = [f"{row['pilot_loss']:.2%}", f"{row['tokens_per_pass']:.2f}"]
        numbers = [row["prompts"], row["target_passes"], row["minutes"]]
        table.add_row(escape(short(row)), *cells, *("–" if one is None else f"{one:g}" for one in numbers))
    Console(stderr=True, width=max(screen.width, 100)).print(table)
    screen.print(
        f"a setting that never loses anything takes {made['least']} prompts; – is more than a million", highlight=False
    )


def audit_run(
    pair: Pair, task: Task, run: Path, prompts: Sequence[tuple[Prompt, str | None]], batch_size: int, **options: Any
) -> State:
    """Answer prompts with a certified rule and watch it, with progress; warns of a drift."""
    from lenience.certification.audit import Audit, audit

    watch, again = Audit(run, pair, task, **options), 0
    total = len(watch.chosen(prompts))
    with progress() as show:
        for done, state in enumerate(audit(watch, prompts, batch_size), 1):
            again += state is None
            show("auditing", done, total)
    state = watch.state
    low, high = state.interval
    present = f"at present in {low:.2%}–{high:.2%}" if low <= high else "which has changed on the way"
    screen.print(
        f"{state.audited} of {state.seen} prompts audited"
        + (f", {state.unreferenced} without a reference, of which the disagreement counts" if state.unreferenced else "")
        + f": loss {state.losses:g}, {present} "
        f"(certified: at most {watch.made['max_drop']:.2%})" + (f"; {again} had been audited before" if again else ""),
        highlight=False,
    )
    if state.drifted and state.unreferenced:
        screen.print(
            f"[red]the answers differ more than was certified; {state.unreferenced} of them had no reference and may differ "
            "without being wrong: give references, or decode strictly and certify again[/]"
        )
    elif state.drifted:
        screen.print("[red]drift: the certificate no longer holds for these prompts; decode strictly and certify again[/]")
    return state


def follow(items: Iterable[Any]) -> dict[str, Any]:
    """Draw the progress of a comparison; returns its frontier."""
    from lenience.evaluation.compare import Estimate

    with progress() as show:
        frontier: dict[str, Any] = {}
        for item in items:
            if isinstance(item, dict):
                frontier = item
            elif isinstance(item, Estimate):
                screen.print(f"{item.answers} answers to decode, about {_duration(item.seconds)}", highlight=False)
            else:
                show(item.phase, item.done, item.total)
    return frontier


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def print_table(frontier: dict[str, Any]) -> None:
    from lenience.evaluation.names import named, short, why

    table = Table("rule", title=escape(f"{frontier['task']}, {frontier['rows'][0]['n']} prompts, {frontier['machine']}"))
    for column in ("window", "accuracy", "paired loss", "tokens/pass", "tokens/s", "s/right answer"):
        table.add_column(column, justify="right")
    for row in named(frontier["rows"]):
        low, high = row["accuracy_interval"]
        lost = row["paired_loss_interval"]
        table.add_row(
            f"{escape(short(row))} [dim]{why(row)}[/]",
            str(row["window"] or "–"),
            f"{row['accuracy']:.1%} [dim]{low:.1%}–{high:.1%}[/]",
            f"{row['paired_loss']:.1%} [dim]{lost[0]:.1%}–{lost[1]:.1%}[/]",
            "–" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            "–" if row["seconds_per_correct"] is None else f"{row['seconds_per_correct']:.3f}",
        )
    Console(stderr=True, width=max(screen.width, 120)).print(table)


def print_answer(pair: Pair, out: Generation, coloured: bool) -> None:
    """An answer on standard output, perhaps with every token coloured by where it came from."""
    from lenience.decoding.response import pieces

    if not coloured:
        print(out.text)
        return
    console = Console(force_terminal=True if sys.stdout.isatty() else None, soft_wrap=True)
    for text, entry in zip(pieces(pair.target, out.tokens), out.trace):
        console.print(text, style=STYLES[entry.origin], end="", markup=False, highlight=False)
    console.print()
    console.print("  ".join(f"[{style}] {origin} [/]" for origin, style in STYLES.items()), highlight=False)


def answer(pair: Pair, prompt: str, profiled: bool, **options: Any) -> tuple[Generation, Profile | None]:
    """One answer; where the time goes is measured the second time."""
    if options.get("window") == "auto":
        with screen.status("picking the window"):
            pair.pick_window([prompt], **options)
    if not profiled:
        return pair.generate(prompt, **options), None
    from lenience.core.profile import Profile

    with screen.status("warming up"):
        warm = pair.generate(prompt, **options)
    screen.print(f"[dim]warmed up in {warm.seconds:.2f} s[/]")
    profile = Profile()
    return pair.generate(prompt, profile=profile, **options), profile


def print_counts(out: Generation, picked: bool = False) -> None:
    screen.print(
        f"[dim]{len(out.tokens)} tokens, {out.target_passes} passes of the target, {out.tokens_per_pass:.2f} tokens per "
        f"pass, {out.tokens_per_second:.0f} tokens/s, {out.accepted_lenient} gained by lenience, ended by {out.finish}"
        + (f"; window {out.window} was picked as the fastest here" if picked else "")
        + "[/]"
    )


def print_profile(profile: Profile) -> None:
    """Where the time of a cycle goes."""
    table = Table("where the time goes", box=None)
    for column in ("ms a cycle", "share"):
        table.add_column(column, justify="right")
    whole = sum(profile.seconds.values())
    for part, seconds in (*profile.seconds.items(), ("all", whole)):
        table.add_row(_PARTS.get(part, part), f"{1e3 * seconds / profile.cycles:.3f}", f"{seconds / whole:.1%}")
    screen.print(table)


_PARTS = {
    "draft": "passes of the draft",
    "target": "passes of the target",
    "rule": "acceptance rule",
    "cache": "caches",
    "rest": "the rest",
}


def print_thresholds(head: Head, folder: Path) -> None:
    """What a fitted head's thresholds come to, and how to use it."""
    from lenience.drafting.stops import Gate, Likely
    from lenience.evaluation.names import probability
    from lenience.rules.judge import Judge

    if head.role == "gate":
        tau, tokens = head.metrics["tau"], head.metrics["mismatches"]
        table = Table("threshold", "acceptable tokens let through", "others let through", box=None)
        for row in head.metrics["thresholds"]:
            table.add_row(probability(row["threshold"]), f"{row['accepted']:.3f}", f"{1 - row['recall']:.3f}")
        screen.print(table)
        screen.print(
            f"{tokens} tokens, to {head.metrics['important'] / tokens:.1%} of which the draft gives more than {tau:g} times "
            f"what the target gives; AUC {head.metrics['auc_out_of_fold']:.3f} on folds it was not fitted to; use it as "
            f"--stop {Gate(str(folder), head.threshold)}",
            highlight=False,
            markup=False,
        )
        return
    if head.role == "stop":
        rejected, tokens = head.metrics["important"], head.metrics["mismatches"]
        screen.print(
            f"{tokens} tokens, {rejected / tokens:.1%} of them rejected; AUC {head.metrics['auc_out_of_fold']:.3f} on folds it "
            f"was not fitted to; use it as --stop {Likely(str(folder), head.threshold)}",
            highlight=False,
            markup=False,
        )
        return
    table = Table("recall of important", "threshold", "unimportant accepted", box=None)
    for row in head.metrics["thresholds"]:
        table.add_row(f"{row['recall']:g}", probability(row["threshold"]), f"{row['accepted']:.3f}")
    screen.print(table)
    screen.print(
        f"AUC {head.metrics['auc_out_of_fold']:.3f} on folds it was not fitted to; "
        f"use it as {Judge(str(folder), head.threshold)}",
        highlight=False,
        markup=False,
    )
