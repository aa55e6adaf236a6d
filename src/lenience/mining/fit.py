"""Fitting heads to what a run mined, or to annotated answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lenience.core.progress import Progress, silent
from lenience.decoding.pair import Pair
from lenience.heads.fitting import FitConfig, fit_head
from lenience.heads.head import Head, Inputs
from lenience.mining.annotated import Annotated, annotated_examples
from lenience.mining.features import compute_features, load_features
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.runs.uses import note_uses, prompt_digest


@dataclass(frozen=True)
class HeadPlan:
    """Which head is fitted."""

    inputs: Inputs
    out: Path
    """The folder that it is saved in."""
    config: FitConfig
    tau: float = 1.0
    """Of a gate: a token is acceptable where draft / target of its probabilities is at most
    this."""
    of: str | None = None
    """Of a stop: the rule whose rejections it learns; None for what the strict rule would reject of
    the target's own answers."""


def fit_run(pair: Pair, run: Path, plan: HeadPlan, progress: Progress = silent) -> Head:
    """Compute the hidden states that a head is fitted to, fit it and save it."""
    role = plan.config.role
    compute_features(pair, run, plan.inputs, role, progress, of=plan.of)
    progress(f"fitting the {role}", 0, 1)
    examples = load_features(run, plan.inputs, role, plan.tau, of=plan.of)
    head = fit_head(examples, plan.inputs, pair.fingerprints, plan.config)
    if role == "gate":
        head = replace(head, metrics={**head.metrics, "tau": plan.tau})
    if plan.of is not None:
        head = replace(head, metrics={**head.metrics, "of": plan.of})
    mined = mined_samples(Journal(run / "journal.jsonl"))
    head = replace(head, prompts=tuple(prompt_digest(sample.prompt_ids) for sample in mined))
    head.save(plan.out)
    progress(f"fitting the {role}", 1, 1)
    return head


def fit_annotated(
    pair: Pair, rows: list[Annotated], plan: HeadPlan, progress: Progress = silent
) -> Head:
    """Fit a judge to answers in which the errors are marked, and save it (Judge Decoding, Bachmann
    2025)."""
    examples = annotated_examples(pair.target, rows, plan.inputs, progress)
    progress("fitting the judge", 0, 1)
    fingerprints = {part: value for part, value in pair.fingerprints.items() if part != "draft"}
    config = replace(plan.config, mend="annotate more answers")
    head = fit_head(examples, plan.inputs, fingerprints, config)
    prompts = [(row.line, row.question) for row in rows]
    note_uses(plan.out.parent, pair.target, prompts, use="fitting", key="annotated")
    digests = (prompt_digest(pair.target.encode(row.question)) for row in rows)
    head = replace(head, prompts=tuple(dict.fromkeys(digests)))
    head.save(plan.out)
    progress("fitting the judge", 1, 1)
    return head
