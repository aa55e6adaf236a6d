"""The steps of a run as a person sees them: with a bar and the time left on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenience.cli.console import progress, screen
from lenience.cli.tables import print_certificate, print_plan

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
