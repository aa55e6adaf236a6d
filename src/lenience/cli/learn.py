"""The commands that train: `init`, `mine`, `annotate`, `fit`, `datastore`; and `push`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Any

from lenience.cli.choices import (
    MANY,
    SETTINGS,
    Models,
    TaskChoice,
    choice_of,
    crew_of,
    expected_tokens,
    fitting,
    is_run,
    left_out,
    mined_with,
    models_of,
    remember,
)
from lenience.cli.console import counted, print_json, say, with_bars
from lenience.cli.fit_options import FitFlags
from lenience.cli.options import (
    Flag,
    Json,
    MineFlags,
    check_folder,
    check_limit,
    drafter_needs_draft,
)
from lenience.cli.steps import (
    build_datastore,
    fit_tree,
    forecast_run,
    mine_run,
    search_layers,
)
from lenience.cli.tables import (
    print_curve,
    print_drafter,
    print_mined,
    print_mixture,
    print_skipped,
    print_thresholds,
    print_trees,
)
from lenience.core.errors import InputError

CONTINUED = 20
"""Assumed number of continuations per mined answer."""


def init(
    run: Path,
    /,
    *,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Write a run's models and task to RUN/lenience.toml, so that later commands on the run need no
    flags for them. mine does this too.

    Parameters
    ----------
    run
        Run folder.
    """
    settings = run / SETTINGS
    if settings.exists():
        raise InputError(f"{settings}: exists already; edit it, or name another folder")
    choice = choice_of(run, choice or TaskChoice())
    task = choice.load()
    models = models_of(run, models)
    if models.target is None and task.name != "wordmath":
        say(
            "no target is named: later commands use the built-in pair, which works on "
            "wordmath only; give --target and --draft"
        )
    remember(run, models, choice)
    say(f"{settings} is written; next: lenience mine --out {quote(str(run))}")
    if json:
        print_json({"run": str(run), "settings": str(settings)})


def mine(
    *,
    out: Path,
    flags: MineFlags | None = None,
    choice: TaskChoice | None = None,
    models: Models | None = None,
    json: Json = False,
) -> None:
    """Find the draft tokens that change the final answer, as training data for the judge. A stopped
    run resumes.

    Parameters
    ----------
    out
        Run folder.
    """
    config = (flags or MineFlags()).config()
    check_folder(out)
    check_limit(config.limit)
    choice = choice_of(out, choice or TaskChoice())
    models = models_of(out, models)
    task = choice.load()
    length = expected_tokens(vars(config.decoder(task)), task)
    times = 1 if config.answers_only else CONTINUED
    pair = models.load(
        tokens=(config.limit or MANY) * length * times,
        needs_draft=config.searches_with_draft or config.policy is not None,
    )
    if not is_run(out):
        remember(out, models, choice)
    with fitting(pair, task, choice) as fits:
        crew = crew_of(flags or MineFlags(), models, choice)
        counts = mine_run(pair, fits, out, config, crew)
    from lenience.heads.fitting import LEAST_SAMPLES

    remember(out, models, choice)
    print_mined(counts, task)
    whole: dict[str, Any] = {"run": str(out), **asdict(counts)}
    if flags and flags.plan:
        whole["plan"] = asdict(forecast_run(out, flags.plan))
    elif config.answers_only:
        run = quote(str(out))
        say(f"next: lenience fit {run} --drafter eagle, or medusa, or model --layers 4")
    elif counts.abstained < counts.mismatches:
        few = min(counts.samples, counts.important) < LEAST_SAMPLES
        more = f"a higher --limit; a judge needs {LEAST_SAMPLES} samples with important mismatches"
        say(f"next: {more if few else f'lenience fit {quote(str(out))}'}")
    if json:
        print_json(whole)


def fit(run: Path, /, *, flags: FitFlags | None = None, json: Json = False) -> None:
    """Train a judge on a mined run and save it in RUN/judge. Other flags train a stop head
    (RUN/stop), a gate (RUN/gate), a mixture (RUN/mixture) or a drafter (RUN/medusa, RUN/blockwise,
    RUN/eagle, RUN/model), or measure trees (RUN/tree.json).

    Parameters
    ----------
    run
        Run folder. With --from annotated: a JSONL file with the fields question, correct, wrong
        (two answers) and error ([begin, end): the wrong characters of the wrong answer); the judge
        is saved in judge/ in a folder named like the file, without .jsonl.
    """
    flags = flags or FitFlags()
    if flags.drafter == "skip":
        return _search_layers(run, flags, json)
    if flags.drafter is not None:
        return _fit_drafter(run, flags, json)
    if flags.mixture:
        return _fit_mixture(run, flags, json)
    if flags.tree:
        return _fit_tree(run, flags, json)
    plan = flags.plan(run)
    if flags.annotated:
        from lenience.training.annotated import read_annotated
        from lenience.training.fit import fit_annotated

        rows = read_annotated(run)  # raises before the models are loaded
        models = Models(flags.target, flags.draft, device=flags.device)
        pair = models.load(needs_draft=False)
        fitted = with_bars(fit_annotated, pair, rows, plan)
    else:
        from lenience.training.fit import fit_run, learning_curve

        for folder in (run, *flags.also):
            mined_with(folder)  # raises where nothing is mined
        models = models_of(run, Models(flags.target, flags.draft, device=flags.device))
        pair = models.load(
            tokens=MANY if flags.gate else 0,
            needs_draft="draft" in plan.inputs.models,
        )
        plan = replace(plan, without=left_out(pair, run, flags.fold))
        if flags.curve:
            return _print_curve(with_bars(learning_curve, pair, run, plan), json)
        fitted = with_bars(fit_run, pair, run, plan)
    print_thresholds(fitted, plan.out)
    if json:
        head = {flags.role: str(plan.out), "head": plan.config.kind}
        print_json({**head, "threshold": fitted.threshold, **fitted.metrics})


def annotate(
    folder: Path,
    /,
    *,
    rule: str = "draft",
    limit: int = 50,
    json: Json = False,
) -> None:
    """Write a page on which a person marks the errors in wrong answers of a comparison. The page
    saves annotated.jsonl, from which fit --from annotated trains a judge (Judge Decoding).

    Parameters
    ----------
    folder
        Folder of a comparison (compare --out).
    rule
        Rule whose wrong answers are marked, where the target is right.
    limit
        Maximum number of answers.
    """
    from lenience.evaluation.annotating import write_annotation_page

    check_limit(limit)
    page = write_annotation_page(folder, rule, limit)
    say(f"{counted(page.answers, 'wrong answer')}: open {page.path}")
    if json:
        print_json({"page": str(page.path), "answers": page.answers})


def _print_curve(rows: list[dict[str, Any]], json: bool) -> None:
    print_curve(rows)
    if json:
        print_json({"curve": rows})


def _fit_tree(run: Path, flags: FitFlags, json: bool) -> None:
    drawn = flags.drawn()
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, device=flags.device))
    drafter = flags.with_ or "model"
    pair = models.load(tokens=MANY, needs_draft=drafter_needs_draft(drafter))
    found = fit_tree(pair, run, drafter, drawn)
    planned = print_trees(found, run / "tree.json")
    if json:
        print_json({"drafter": found.drafter, "shares": found.shares, "trees": planned})


def _fit_mixture(run: Path, flags: FitFlags, json: bool) -> None:
    from lenience.training.mixture import fit_mixture

    plan = flags.mixture_plan(run)
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, device=flags.device))
    task = choice_of(run, TaskChoice()).load()
    fitted = with_bars(fit_mixture, models.load(tokens=MANY), task, run, plan)
    print_mixture(fitted, plan.out)
    if json:
        print_json({"mixture": str(plan.out), **fitted.metrics})


def _search_layers(run: Path, flags: FitFlags, json: bool) -> None:
    flags.check_skip()
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, device=flags.device))
    found = search_layers(models.load(needs_draft=False), run)
    best = print_skipped(found)
    if json:
        print_json({"drafter": best, "skipped": list(map(asdict, found))})


def _fit_drafter(run: Path, flags: FitFlags, json: bool) -> None:
    from lenience.training.fit_drafter import fit_drafter

    plan = flags.drafter_plan(run)
    mined_with(run)  # raises where nothing is mined
    models = models_of(run, Models(flags.target, flags.draft, device=flags.device))
    distils = plan.kind == "model" and plan.layers is None
    pair = models.load(tokens=0 if plan.layers else MANY, needs_draft=distils)
    fitted = with_bars(fit_drafter, pair, run, plan)
    print_drafter(plan.kind, fitted.metrics, plan.out)
    if json:
        used_as = {
            "drafter": plan.kind if plan.kind == "model" else f"{plan.kind}:{plan.out}"
        }
        if plan.kind == "model":
            used_as["draft"] = str(plan.out)
        if plan.tune_target:
            used_as["target"] = str(plan.out / "target")
        print_json({**used_as, **fitted.metrics})


def datastore(
    corpus: tuple[Path, ...],
    /,
    *,
    out: Path,
    field: str = "text",
    target: str | None = None,
    json: Json = False,
) -> None:
    """Build a datastore from a corpus, for --drafter datastore:OUT.

    Parameters
    ----------
    corpus
        Text files. Each row of a .jsonl or .jsonl.gz file is a document; any other file is one
        document.
    out
        Folder of the datastore.
    field
        Field of a row that holds its text.
    target
        Model whose tokenizer is used. Default: the built-in target.
    """
    store = build_datastore(corpus, out, field, target)
    say(
        f"{store.about['tokens']:,} tokens of {store.about['documents']:,} documents; "
        "use it as "
        f"--drafter datastore:{out}"
    )
    if json:
        print_json({"drafter": f"datastore:{out}", **store.about})


def push(
    head: Path,
    name: str,
    /,
    *,
    license: str | None = None,
    private: Flag = False,
    json: Json = False,
) -> None:
    """Upload a trained head to the Hugging Face Hub, with a model card.

    Parameters
    ----------
    head
        Folder of the head, such as RUN/judge.
    name
        Repository name, org/name; others use it as --rule judge:hf:org/name@T.
    license
        Licence in the model card, such as apache-2.0.
    private
        Make the repository private if it does not exist yet.
    """
    from lenience.evaluation.cards import push

    place = push(head, name, license, private)
    say(f"{head} is at {place}")
    if json:
        print_json({"head": f"hf:{name}", "at": place})
