"""Training of heads on a run's mismatches, or on annotated answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lenience.core.errors import InputError
from lenience.core.progress import Progress, silent
from lenience.core.protocols import Rule
from lenience.decoding.checks import share_vocabulary
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig, fit_head
from lenience.heads.head import Head, Inputs
from lenience.heads.streaming import StreamedRows
from lenience.mining.resampling import shares_harmless
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples, read_run
from lenience.runs.uses import note_uses, prompt_digest
from lenience.training.annotated import Annotated, annotated_examples
from lenience.training.features import compute_features, fit_in_memory, load_features

CURVE_SHARES = (0.125, 0.25, 0.5, 1.0)
CURVE_RECALL = 0.99
"""Shares of the samples in a learning curve, and the recall at which its judges are compared."""


@dataclass(frozen=True)
class HeadPlan:
    """Settings of the head to train."""

    inputs: Inputs
    out: Path
    """Folder in which the head is saved."""
    config: FitConfig = field(default_factory=FitConfig)
    tau: float = 1.0
    """Largest acceptable ratio of draft to target probability for a gate."""
    also: tuple[Path, ...] = ()
    """Further runs of the same pair to train on."""
    soft: bool = False
    """True to learn soft labels: the share of resampled continuations that leave the answer
    unchanged."""
    without: frozenset[str] = frozenset()
    """Digests of the prompts to leave out."""
    of: Rule | None = None
    """Rule whose rejections a stop learns; None for the strict rule's rejections on the target's
    own answers."""


def fit_run(pair: Pair, run: Path, plan: HeadPlan, progress: Progress = silent) -> Head:
    """Compute the hidden states that a head needs, train the head and save it in `plan.out`. Raises
    InputError if the runs do not suit the head or hold too few samples."""
    role = plan.config.role
    runs = (run, *plan.also)
    examples = _computed(pair, run, plan, progress)
    progress(f"training the {role}", 0, 1)
    head = fit_head(examples, plan.inputs, pair.fingerprints, plan.config)
    if role == "gate":
        head = replace(head, metrics={**head.metrics, "tau": plan.tau})
    if plan.of is not None:
        rejecting = [asked.head.fingerprint for asked in plan.of.heads]
        head = replace(
            head, metrics={**head.metrics, "of": str(plan.of), "of_heads": rejecting}
        )
    if plan.also or plan.soft:
        further = {"runs": len(runs), "soft": plan.soft}
        head = replace(head, metrics={**head.metrics, **further})
    prompts = []
    for each in runs:
        for prompt in prompt_digests(each):
            if prompt not in plan.without:
                prompts.append(prompt)
    head = replace(head, prompts=tuple(dict.fromkeys(prompts)))
    if role == "judge":  # stops and gates learn from newly decoded answers
        mined = read_run(run)
        head = replace(head, temperature=mined.temperature, drafter=mined.drafter)
    head.save(plan.out)
    progress(f"training the {role}", 1, 1)
    return head


def learning_curve(
    pair: Pair, run: Path, plan: HeadPlan, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Return a head's metrics for growing numbers of training samples: an eighth, a quarter, a half
    and all, drawn by the plan's seed.

    Each row has samples, mismatches, important, auc_out_of_fold, auc_interval and accepted, the
    share of unimportant mismatches accepted at a threshold with recall CURVE_RECALL. Sizes with too
    few samples are left out; raises InputError if even all samples are too few. Only hidden states
    are saved.
    """
    examples = _computed(pair, run, plan, progress)
    order = np.random.default_rng(plan.config.seed).permutation(
        np.unique(examples.samples)
    )
    rows: list[dict[str, Any]] = []
    for done, share in enumerate(CURVE_SHARES):
        progress("training", done, len(CURVE_SHARES))
        drawn = order[: max(1, round(share * len(order)))]
        part = examples.rows(np.isin(examples.samples, drawn))
        try:
            head = fit_head(part, plan.inputs, pair.fingerprints, plan.config)
        except InputError:
            if share == 1:
                raise
            continue
        (at,) = (
            row for row in head.metrics["thresholds"] if row["recall"] == CURVE_RECALL
        )
        kept = ("samples", "mismatches", "important", "auc_out_of_fold", "auc_interval")
        rows.append(
            {**{key: head.metrics[key] for key in kept}, "accepted": at["accepted"]}
        )
    progress("training", len(CURVE_SHARES), len(CURVE_SHARES))
    return rows


def _computed(pair: Pair, run: Path, plan: HeadPlan, progress: Progress) -> Examples:
    """Return the training rows of a plan's head."""
    runs = (run, *plan.also)
    judges = runs if plan.config.role == "judge" else ()
    temperatures = {judge: read_run(judge).temperature for judge in judges}
    for mined_run in temperatures:
        _check_searched(mined_run, like=run)
    for mined_run, temperature in temperatures.items():
        if temperature != temperatures[run]:
            raise InputError(
                f"{mined_run}: was mined at temperature {temperature:g}, and {run} at "
                f"{temperatures[run]:g}; fit one judge for each"
            )
    if temperatures.get(run) and plan.inputs.ahead is not None:
        raise InputError(
            f"{run}: was mined at temperature {temperatures[run]:g}, and a judge that "
            "looks ahead "
            "learns from greedily drafted windows; leave out --ahead"
        )
    if "draft" in plan.inputs.models and not share_vocabulary(pair.models):
        raise InputError(
            "--models: the draft has another tokenizer than the target, so its states are of other "
            "tokens; take --models target"
        )
    for judge in judges if plan.inputs.ahead is not None else ():
        _check_windows(judge)
    for folder in runs:
        compute_features(
            pair, folder, plan.inputs, plan.config.role, progress, of=plan.of
        )
    in_files = not fit_in_memory(runs, plan.inputs, plan.config.role, plan.of)
    return _joined(
        [_examples(folder, plan, in_files, asked=folder == run) for folder in runs]
    )


def _check_searched(run: Path, like: Path) -> None:
    """Raise InputError if a run holds only answers, or was mined with another drafter than the run
    `like`."""
    record = read_run(run)
    if record.answers_only:
        raise InputError(
            f"{run}: holds the target's answers and no mismatches; a judge needs a run "
            "that was "
            "mined with --draft or --drafter"
        )
    of_run = _drafter_name(record.drafter)
    of_first = _drafter_name(read_run(like).drafter)
    if of_run != of_first:
        raise InputError(
            f"{run}: was mined with drafter {of_run}, and {like} with {of_first}; fit "
            "one judge "
            "for each"
        )


def _drafter_name(record: dict[str, Any] | None) -> str:
    return "model" if record is None else str(record["spec"])


def _check_windows(run: Path) -> None:
    """Raise InputError if a judge that looks ahead cannot learn from a run because the draft model
    did not draft its windows."""
    record = read_run(run)
    if record.drafter:
        raise InputError(
            f"{run}: was mined with drafter {record.drafter['spec']}, and a judge that "
            "looks ahead "
            "learns from windows of the draft model; leave out --ahead"
        )
    policy = record.policy
    if policy is None:
        return
    of = Decoder.parse(policy["setting"])
    others = {
        f"drafter {of.drafter}": not of.drafter.proposes_as_draft,
        f"tree {of.tree}": not of.tree.is_chain,
        f"draft_temperature {of.draft_temperature}": bool(of.draft_temperature),
    }
    for part, is_other in others.items():
        if is_other:
            raise InputError(
                f"{run}: was mined with {part}, and a judge that looks ahead learns "
                "from the draft model's continuations; leave out --ahead"
            )


def prompt_digests(run: Path) -> list[str]:
    """Return the digests of a run's prompts, in the journal's order."""
    mined = mined_samples(Journal(run / "journal.jsonl"))
    return [prompt_digest(sample.prompt_ids) for sample in mined]


def _examples(
    run: Path, plan: HeadPlan, in_files: bool, asked: bool
) -> tuple[Examples, list[str]]:
    """Return a run's training rows, and the digest of each sample's prompt. Raises InputError for
    missing soft labels."""
    role = plan.config.role
    of = plan.of
    examples = load_features(run, plan.inputs, role, plan.tau, of=of, in_files=in_files)
    if plan.soft and (asked or (run / "resamples.jsonl").exists()):
        examples = replace(
            examples, shares=np.array(shares_harmless(run), dtype=np.float32)
        )
    prompts = prompt_digests(run)
    if plan.without:
        kept = np.array([content not in plan.without for content in prompts])
        examples = examples.rows(kept[examples.samples])
    return examples, prompts


def _joined(parts: list[tuple[Examples, list[str]]]) -> Examples:
    """Return the rows of several runs; rows with the same prompt count as the same sample."""
    numbers: dict[str, int] = {}
    samples = []
    for examples, prompts in parts:
        of_run = [numbers.setdefault(content, len(numbers)) for content in prompts]
        samples.append(np.array(of_run, dtype=int)[examples.samples])
    soft = any(examples.shares is not None for examples, _ in parts)
    return Examples(
        _all_rows([examples.x for examples, _ in parts]),
        np.concatenate([examples.harmless for examples, _ in parts]),
        np.concatenate(samples),
        np.concatenate([examples.labels for examples, _ in parts]) if soft else None,
    )


def _all_rows(parts: Sequence[np.ndarray | StreamedRows]) -> np.ndarray | StreamedRows:
    """Return the states of several runs, concatenated in memory or joined in files."""
    if len(parts) == 1:
        return parts[0]
    streamed = [part for part in parts if isinstance(part, StreamedRows)]
    if streamed:
        return StreamedRows.joined(streamed)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


def fit_annotated(
    pair: Pair, rows: list[Annotated], plan: HeadPlan, progress: Progress = silent
) -> Head:
    """Train a judge on answers with annotated errors, and save it (Judge Decoding, Bachmann
    2025)."""
    examples = annotated_examples(pair.target, rows, plan.inputs, progress)
    progress("training the judge", 0, 1)
    fingerprints = {}
    for part, value in pair.fingerprints.items():
        if part != "draft":
            fingerprints[part] = value
    config = replace(plan.config, fix="annotate more answers")
    head = fit_head(examples, plan.inputs, fingerprints, config)
    prompts = [(row.line, row.question) for row in rows]
    note_uses(plan.out.parent, pair.target, prompts, use="fitting", key="annotated")
    digests = (prompt_digest(pair.target.encode(row.question)) for row in rows)
    head = replace(head, prompts=tuple(dict.fromkeys(digests)))
    head.save(plan.out)
    progress("training the judge", 1, 1)
    return head
