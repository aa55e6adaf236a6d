"""The command line: a thin table of commands. torch is imported by the commands that need it, not by this module."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter

from lenience.cli.console import follow, loading, screen
from lenience.cli.options import Models, TaskChoice, inputs_of, judge_of, mined_with, models_of, read_ids, task_of
from lenience.cli.steps import answer, audit_run, certify_run, fit_annotated, fit_run, mine_run
from lenience.cli.tables import print_answer, print_counts, print_profile, print_table, print_thresholds
from lenience.core.errors import InputError, first_line
from lenience.core.version import VERSION

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.heads.head import Role

app = App(
    name="lenience",
    help="Speculative decoding that learns which draft tokens do not matter for your task.",
    version=VERSION,
)


Flag = Annotated[bool, Parameter(negative="")]
Window = int | Literal["auto"]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object as the last line.")]


@app.command
def generate(
    prompt: str | None = None, /, *, rule: str = "exact", window: Window | None = None, stop: str | None = None,
    max_new_tokens: int | None = None, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    seed: int = 0, stop_string: tuple[str, ...] = (), show: Flag = False, profile: Flag = False,
    models: Models | None = None, json: Json = False,
) -> None:  # fmt: skip
    """Answer one prompt.

    Parameters
    ----------
    prompt
        The prompt; without it, standard input or, for the built-in pair at a terminal, one of its task's problems.
    rule
        The acceptance rule, such as exact, speculative, topk:K, fuzzy:js@T or judge:PATH@T (docs/rules.md has them all), or
        target or draft for that model alone; certified:RUN is what a run's certificate certifies.
    window
        How many tokens are drafted at most in a cycle, 8 or what a certificate binds if left out; auto measures which is
        fastest for this prompt.
    stop
        What ends drafting earlier: fixed (nothing, the default), heuristic, confidence:P, entropy:P, head:PATH@T or
        gate:PATH@T.
    max_new_tokens
        The length limit of the answer, 256 or what a certificate binds if left out.
    temperature
        0 is greedy.
    top_k
        Sample among the K most probable tokens.
    top_p
        Sample among the fewest tokens that hold this share of the probability.
    seed
        Of the sampling.
    stop_string
        End the answer before this text; may be given again.
    show
        Colour every token by where it came from.
    profile
        Say where the time goes; the prompt is answered once before, which is not counted.
    """
    from lenience.decoding.certified import is_certified, resolve
    from lenience.drafting.stops import parse_stop
    from lenience.rules.registry import terms

    given: dict[str, Any] = {
        "rule": rule, "window": window, "stop": stop, "max_new_tokens": max_new_tokens, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "stop_strings": stop_string,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say is said when it decodes
        settled = resolve(rule, options)[0] if is_certified(rule) else options
    drafts = bool(terms(settled["rule"]))  # what is wrong is told before the models are loaded
    parse_stop(settled.get("stop", "fixed"))
    pair = (models or Models()).load()
    if prompt is None:
        prompt = _prompt(pair)
    out, told = answer(pair, prompt, profile, **options, seed=seed)
    if show or not json:
        print_answer(pair, out, show)
    print_counts(out, picked=window == "auto" and drafts)
    if told:
        print_profile(told)
    if json:
        trace = [[entry.token, entry.origin, entry.score] for entry in out.trace]
        whole = {key: value for key, value in vars(out).items() if key != "trace"}
        where = {"profile": {"cycles": told.cycles, "seconds": told.seconds}} if told else {}
        _print_json({"prompt": prompt, **whole, "tokens_per_pass": out.tokens_per_pass, **where, "trace": trace})


def _prompt(pair: Pair) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.read().rstrip("\n")
    if pair.name != "built-in":
        raise InputError("PROMPT: give a prompt, as an argument or on standard input")
    from lenience.tasks.wordmath import WordMath

    found = next(iter(WordMath().samples("test"))).prompt
    screen.print(f"[dim]no prompt given; one of wordmath's problems:[/] {found}", highlight=False)
    return str(found)


@app.command
def mine(
    *, out: Path, limit: int | None = None, batch_size: int = 16, choice: TaskChoice | None = None,
    models: Models | None = None, json: Json = False,
) -> None:  # fmt: skip
    """Search a task's training samples for important tokens; started again, it goes on where it stopped.

    Parameters
    ----------
    out
        The run folder.
    limit
        How many samples; all of the training split if left out.
    batch_size
        How many samples are decoded together.
    """
    _check_limit(limit)
    choice, models = choice or TaskChoice(), models or Models()
    task = choice.load()
    pair = models.load(long=True)
    counts = mine_run(pair, task, out, limit, max_new_tokens=choice.max_new_tokens, batch_size=batch_size)
    found_none = counts["abstained"] == counts["mismatches"] > 0
    screen.print(
        f"{counts['samples']} samples, {counts['mismatches']} mismatches, {counts['important']} important, "
        f"{counts['abstained']} without a parseable answer; "
        + ("no answer was found in any, look at --answer" if found_none else f"next: lenience fit {out}"),
        highlight=False,
        markup=False,
    )
    if json:
        _print_json({"run": str(out), **counts})


@app.command
def fit(
    run: Path, /, *, head: Literal["logistic", "mlp", "adam", "adamw"] | None = None, recall: float = 0.9,
    models: str | None = None, tokens: str | None = None, layer: int | None = None,
    from_: Annotated[Literal["run", "annotated"], Parameter(name="--from")] = "run", stop: Flag = False, gate: Flag = False,
    tau: float | None = None, out: Path | None = None, seed: int = 0, target: str | None = None, draft: str | None = None,
    device: str = "auto", json: Json = False,
) -> None:  # fmt: skip
    """Fit a judge to a run's journal and save it in RUN/judge; or a stop condition for the drafter, in RUN/stop or RUN/gate.

    Parameters
    ----------
    run
        The run folder; or, with --from annotated, a JSONL file of question, correct, wrong (two answers) and error (of the
        wrong one, the characters [begin, end] that are wrong), whose judge is saved in RUN without .jsonl, in judge/.
    head
        logistic, as AutoJudge has it; mlp, with a hidden layer, which tells better where there is much to learn from; adamw,
        as Judge Decoding has it, the default for annotated answers; or adam, as SPRINTER has it, the default for a gate.
    recall
        The share of important tokens that the judge's own threshold must reject; other thresholds are listed too.
    models
        Whose hidden states a judge reads: target, draft or, by default, both, with a comma.
    tokens
        After which token was read: draft (the drafted one), previous, target (for study only), or several, with a comma; by
        default draft,previous for a judge and draft for a gate.
    layer
        Read the target's states after this layer, -1 being the last, before the final norm; without it after that norm,
        and -1 for annotated answers. Such a judge reads the target alone.
    from
        What to learn from: a run's mined mismatches, or annotated answers (Judge Decoding).
    stop
        Fit a head on the draft's states that says when to stop drafting, used as --stop head:RUN/stop@T.
    gate
        Fit a head that also says which tokens need no asking the target, used as --stop gate:RUN/gate@T (SPRINTER).
    tau
        A token is acceptable to the gate where draft / target of its probabilities is at most this, 1 by default.
    out
        Save the head in another folder.
    seed
        Of the split.
    target
        Where the target is now; by default where the run was mined.
    draft
        Where the draft is now.
    device
        cpu, cuda, …
    """
    if not 0 < recall <= 1:
        raise InputError(f"--recall {recall}: must be in (0, 1]")
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed {seed}: must be from 0 to 2**32 - 1")
    role: Role = "stop" if stop else "gate" if gate else "judge"
    if stop and gate:
        raise InputError("--gate: is another head than --stop's; fit them one after the other")
    if tau is not None and not (gate and tau > 0):
        raise InputError(f"--tau {tau:g}: is a gate's, and above 0")
    kind = head or ("adamw" if from_ == "annotated" else "adam" if gate else "logistic")
    inputs = inputs_of(role, from_ == "annotated", models, tokens, layer)
    options: dict[str, Any] = {"kind": kind, "recall": recall, "seed": seed}
    folder = out or (run.with_suffix("") if from_ == "annotated" else run) / role
    if from_ == "run" and run.is_file():
        raise InputError(f"{run}: is a file; name a run folder or, for annotated answers, give --from annotated")
    if file := next((part for part in (folder, *folder.parents) if part.is_file()), None):
        raise InputError(f"--out {folder}: {file} is a file; name another folder")
    if from_ == "annotated":
        from lenience.mining.annotated import read_annotated

        rows = read_annotated(run)  # what is wrong is told before the models are loaded
        fitted = fit_annotated(Models(target, draft, None, device).load(), rows, inputs, folder, **options)
    else:
        pair = mined_with(run, target, draft, device).load(long=gate)
        fitted = fit_run(pair, run, inputs, folder, role, tau or 1.0, **options)
    print_thresholds(fitted, folder)
    if json:
        _print_json({role: str(folder), "head": kind, "threshold": fitted.threshold, **fitted.metrics})


@app.command
def certify(
    run: Path, /, *, max_drop: float = 0.01, confidence: float = 0.95, rule: tuple[str, ...] = (),
    threshold: tuple[float, ...] = (), loss: Literal["paired", "net", "disagreement", "task"] = "paired",
    procedure: Literal["auto", "binomial", "hoeffding-bentkus", "betting"] = "auto", window: Window = 8, stop: str = "fixed",
    temperature: float = 0.0, seed: int = 0, limit: int | None = None, ids: Path | None = None, split: str = "train",
    plan: Flag = False, pilot: int = 40, choice: TaskChoice | None = None, models: Models | None = None, json: Json = False,
) -> None:  # fmt: skip
    """Find the most lenient setting of a rule whose loss of quality is at most --max-drop, with a confidence; started again,
    it goes on where it stopped.

    Parameters
    ----------
    run
        The run folder; it records which prompts have been used for what, and none is used twice.
    max_drop
        The largest loss allowed, as a fraction.
    confidence
        How sure to be that it is not more.
    rule
        The rule, by default the run's judge; one without its threshold, or a name such as topk or fuzzy:js, stands for a ladder
        of settings from strict to lenient. Of several rules the fastest that passes is certified.
    threshold
        The thresholds to try.
    loss
        paired (the target alone was right and the lenient answer is wrong), net (losses less gains), disagreement with the
        target's answer (needs no references), or task (what the task's own loss returns, in [0, 1]).
    procedure
        How each setting is tested: binomial for paired and disagreement, betting for the others, or hoeffding-bentkus.
    window
        The draft window, which the certificate binds; auto picks the fastest, on prompts of its own.
    stop
        What ends drafting earlier.
    temperature
        0 is greedy.
    seed
        Of the drawing of prompts and of the sampling.
    limit
        How many prompts at most; by default, as many as a setting needs that loses a third of what is allowed.
    ids
        A file with the ids of the prompts to use, one a line.
    split
        The task's split that prompts are drawn from.
    plan
        Only say what a certificate would take, from a pilot of fresh prompts.
    pilot
        How many prompts the pilot takes; they are used up.
    """
    _check_limit(limit)
    if pilot < 1:
        raise InputError(f"--pilot {pilot}: must be 1 or more")
    from lenience.certification.question import Question

    choice = choice or TaskChoice()
    rules = rule or (judge_of(run),)
    question = Question(rules, max_drop, confidence, loss, procedure, threshold, window, stop, temperature, seed, limit,
                        read_ids(ids), split, choice.max_new_tokens)  # fmt: skip
    _ = question.ladders  # what is wrong is told before the models are loaded
    task = task_of(run, choice)
    pair = models_of(run, models).load(long=True)
    made = certify_run(pair, task, run, question, pilot if plan else None)
    if json:
        _print_json({"run": str(run), **made})


@app.command
def audit(
    run: Path, prompts: Path, /, *, share: float = 0.05, confidence: float = 0.95, batch_size: int = 16, seed: int = 0,
    choice: TaskChoice | None = None, models: Models | None = None, json: Json = False,
) -> None:  # fmt: skip
    """Answer a small random share of prompts both with a run's certified rule and with the target alone, and say whether the
    certificate still holds. RUN/audit.jsonl keeps what was seen.

    Parameters
    ----------
    run
        The run folder with the certificate.
    prompts
        A JSONL file of prompt or messages and, if known, reference.
    share
        The share of prompts that is audited.
    confidence
        A drift is told wrongly, ever, with a chance of at most one less this.
    batch_size
        How many prompts are decoded together.
    seed
        Of the choice of prompts.
    """
    from lenience.certification.audit import read_prompts
    from lenience.decoding.certified import read_certificate

    rows = read_prompts(prompts)  # what is wrong is told before the models are loaded
    read_certificate(run)
    if choice and choice.max_new_tokens is not None:
        raise InputError("--max-new-tokens: an audit decodes as certified; leave it out")
    task = task_of(run, choice or TaskChoice())
    pair = models_of(run, models).load(long=len(rows) > 100)
    state = audit_run(pair, task, run, rows, share=share, confidence=confidence, seed=seed, batch_size=batch_size)
    if json:
        _print_json({"run": str(run), **vars(state)})


@app.command
def compare(
    *, rule: tuple[str, ...], window: tuple[int, ...] = (), stop: str = "fixed", limit: int | None = None,
    tuning: int = 20, timed: int = 50, repeats: int = 3, batch_size: int = 32, temperature: float = 0.0, seed: int = 0,
    out: Path | None = None, choice: TaskChoice | None = None, models: Models | None = None, json: Json = False,
) -> None:  # fmt: skip
    """Compare acceptance rules on a task's test samples: quality and speed, each with its interval.

    Parameters
    ----------
    rule
        A rule; give one for each row. The target and the draft alone are always compared. all stands for a grid of every rule
        and, for a judge that is named beside it without a threshold, for several.
    window
        The draft windows to choose from, 2 4 8 16 32 by default; each rule runs at its fastest and at the widest.
    stop
        What ends drafting earlier, for all rules: fixed (nothing), heuristic, confidence:P, entropy:P, head:PATH@T or
        gate:PATH@T.
    limit
        How many test samples; all if left out.
    tuning
        How many other samples the windows are chosen on.
    timed
        How many of the test samples are decoded one by one as well, for the seconds.
    repeats
        How often each of those is decoded; medians are taken.
    batch_size
        How many samples are decoded together where quality is measured.
    temperature
        0 is greedy.
    seed
        Of the sampling.
    out
        A folder for frontier.json and report.html; with it, a comparison that was stopped goes on.
    """
    _check_limit(limit)
    if any(one < 1 for one in window):
        raise InputError("--window: must be 1 or more")
    from lenience.decoding.certified import refuse_certified
    from lenience.evaluation.compare import WINDOWS, heads
    from lenience.evaluation.compare import compare as run
    from lenience.rules.settings import expand

    refuse_certified(rule)
    heads(expand(rule, temperature), stop)  # what is wrong is told before the models are loaded
    choice, models = choice or TaskChoice(), models or Models()
    task = choice.load()
    pair = models.load(long=True)
    frontier = follow(run(pair, task, rule, windows=window or WINDOWS, stop=stop, limit=limit, tuning=tuning, timed=timed,
                          repeats=repeats, batch_size=batch_size, max_new_tokens=choice.max_new_tokens, temperature=temperature,
                          seed=seed, out=out))  # fmt: skip
    if out is not None:
        from lenience.evaluation.pages import write_report

        write_report(out / "report.html", frontier)
    print_table(frontier)
    if out is not None:
        screen.print(f"report: {out / 'report.html'}", highlight=False, markup=False)
    if json:
        _print_json({key: value for key, value in frontier.items() if key != "examples"})


@app.command
def demo(*, out: Path = Path("demo"), fresh: int = 8, limit: int = 100, json: Json = False) -> None:
    """The whole story on the built-in pair: mine, fit, certify, compare, report.html.

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
    told = tell(out, fresh, limit)
    if json:
        _print_json(told)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 1 the run failed, 2 the arguments or the input are wrong."""
    warnings.formatwarning = lambda message, *_, **__: f"lenience: {message}\n"
    try:
        command, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
        command(*bound.args, **bound.kwargs)
    except (InputError, cyclopts.CycloptsError) as error:
        _fail(first_line(error), 2)
    except KeyboardInterrupt:
        _fail("stopped; finished samples are kept, the same command goes on from them", 1)
    except Exception as error:
        if os.environ.get("LENIENCE_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {first_line(error)} (LENIENCE_DEBUG=1 shows where)", 1)


def _fail(message: str, status: int) -> None:
    print(f"lenience: {message}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
