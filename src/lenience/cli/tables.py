"""Printed output: tables, answers and counts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lenience.cli.console import counted, duration, say, screen, wide

if TYPE_CHECKING:
    from lenience.certification.audit import Audit, State
    from lenience.certification.certificate import Certificate
    from lenience.certification.certify import Plan
    from lenience.certification.speeds import Timed
    from lenience.certification.tune import Races, Tuned
    from lenience.core.profile import Profile
    from lenience.decoding.decoder import Decoder
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.drafting.trees.planning import Acceptance
    from lenience.evaluation.table import Frontier, HumanGrades
    from lenience.heads.head import Head
    from lenience.mining.forecast import Forecast
    from lenience.mining.search import MinedCounts
    from lenience.tasks import Task
    from lenience.training.skipping import Skipped

STYLES = {
    "draft": "black on bright_blue",
    "draft-lenient": "bold black on bright_green",
    "draft-trusted": "black on bright_yellow",
    "correction": "black on bright_red",
    "bonus": "black on white",
}
"""Colours of tokens by origin."""
MARKS = {
    "draft": ("", ""),
    "draft-lenient": ("«", "»"),
    "draft-trusted": ("‹", "›"),
    "correction": ("[", "]"),
    "bonus": ("(", ")"),
}
"""Marks around tokens by origin, for output without colours."""
PARTS = {
    "draft": "passes of the draft",
    "target": "passes of the target",
    "rule": "acceptance rule",
    "cache": "caches",
    "rest": "the rest",
}
"""Names of the parts of a cycle in a profile."""


def print_certificate(run: Path, certificate: Certificate) -> None:
    """Print the tested settings and the certificate."""
    from lenience.rules.baselines import is_baseline

    loss = certificate.loss
    limit = f"{certificate.max_drop:.2%}"
    title = f"loss ({loss}) at most {limit}, confidence {certificate.confidence:.0%}"
    table = Table("setting", title=title)
    for column in ("window", "prompts", "losses", "bound, alone", "tokens/pass", ""):
        table.add_column(column, justify="right")
    for row in certificate.tried:
        is_server = is_baseline(row.rule)
        cells = [
            "–" if is_server else row.shown_window,
            str(row.n),
            f"{row.losses:g}",
            f"{row.upper_bound:.2%}",
        ]
        cells.append("–" if is_server else f"{row.tokens_per_pass:.2f}")
        verdict = row.verdict(certificate.max_drop)
        table.add_row(escape(row.shown_name), *cells, verdict)
    wide(100).print(table)
    if certificate.grading:
        say(graded(certificate.grading))
    level = (
        certificate.level
        if certificate.level is not None
        else 1 - certificate.confidence
    )
    say(f"attempt {certificate.attempt} on such prompts, tested at level {level:.3g}")
    if certificate.withdrawn:
        say(f"the certificate is withdrawn: {certificate.withdrawn}")
        return
    certified = certificate.certified
    if certified and is_baseline(certified.rule):
        servers = "--reference … --candidate …"
        say(f"certified: {certified.rule}")
        say(f"next: lenience audit {run} live.jsonl {servers}")
        return
    if certified:
        use = f"use it as --rule certified:{run}"
        options = "".join(
            f", {name} {value}" for name, value in certified.options.items()
        )
        say(
            f"certified: {certified.rule}, window {certified.shown_window}{options}; {use}"
        )
        return
    _say_why_not(run, certificate)


def _say_why_not(run: Path, certificate: Certificate) -> None:
    """Print why nothing is certified, and the earlier certificate that the run still has."""
    from lenience.certification.certificate import read_certificate

    more = ""
    if certificate.needed:
        more = f"; about {certificate.needed} prompts would be needed"
    say(f"nothing is certified: {certificate.reason}{more}")
    earlier = read_certificate(run)
    if earlier.withdrawn:
        say(f"the run's earlier certificate is withdrawn: {earlier.withdrawn}")
    elif earlier.certified:
        limit = f"{earlier.max_drop:.2%}"
        say(
            f"the run's earlier certificate, of a loss of at most {limit}, stays: "
            f"certified:{run} "
            f"is {earlier.certified.rule}"
        )


def found_by(task: Task) -> str:
    """Return a phrase that says how a task's answers are found, with the flag that changes it."""
    from lenience.tasks import JsonlTask

    if isinstance(task, JsonlTask):
        return "how answers are found (--answer)"
    return f"how task {task.label} finds answers"


def planned(found: Forecast, run: str) -> str:
    """Return a sentence with the estimated cost of mining."""
    low, high = found.important_interval
    fewest, most = found.samples_interval
    to = f"{most:,}" if most else "many more"
    lines = [
        f"by {found.pilot} samples: {found.mismatches:.1f} mismatches a sample, "
        f"{found.important:.1f} of them important ({low:.1f}–{high:.1f})",
        f"{found.labels:,} important ones take about {found.samples:,} samples "
        f"({fewest:,}–{to}): {duration(found.seconds)} on this machine, "
        f"{found.target_passes:,} "
        f"passes of the target, which reads {found.target_tokens:,} tokens, and "
        f"{found.draft_tokens:,} tokens of the draft",
        f"next: lenience mine --out {run} --limit {found.samples}",
    ]
    return "\n".join(lines)


def print_races(races: Races) -> None:
    """Print the fastest setting of each group."""
    from lenience.decoding.decoder import Decoder

    table = Table("setting, at its fastest", title=f"races on {escape(races.machine)}")
    for column in (
        "drafter",
        "window",
        "stop",
        "tokens/s",
        "times strict",
        "times the target",
    ):
        table.add_column(column, justify="right")
    for raced in (
        races.alone,
        races.strict,
        *chain.from_iterable(races.lenient),
    ):
        decoder = Decoder.parse(raced.setting)
        speed = raced.tokens_per_second
        name = _rule_name(decoder)
        drafter = str(decoder.without_paths().drafter) if decoder.window else "–"
        window = str(decoder.window or "–")
        stop = str(decoder.without_paths().stop)
        cells = [drafter, window, stop, f"{speed:.0f}"]
        times = (speed / base.tokens_per_second for base in (races.strict, races.alone))
        table.add_row(
            escape(name), *map(escape, cells), *(f"{time_:.2f}" for time_ in times)
        )
    wide(110).print(table)
    for why in races.refused:
        say(f"did not race: {why}")
    for engine in races.late:
        say(f"did not race: {engine}: the {races.minutes:g} minutes were used up")


def print_passed(passed: Sequence[Timed], batch_size: int = 1) -> None:
    """Print the certified settings that were timed again, the fastest first."""
    from lenience.decoding.decoder import Decoder

    if not passed:
        return
    named = []
    for raced in sorted(passed, key=lambda raced: -raced.tokens_per_second):
        decoder = Decoder.parse(raced.setting)
        window = f" (window {decoder.window})" if decoder.window else ""
        named.append(f"{_rule_name(decoder)}{window} {raced.tokens_per_second:.0f}")
    say(
        "the fastest settings that passed, timed again on "
        f"{_turns(passed[0], batch_size)}, in tokens/s: {', '.join(named)}"
    )


def _turns(timed: Timed, batch_size: int) -> str:
    """Return the number of prompts, or of batches, that a decoder was timed on."""
    turns = len(timed.tokens)
    if batch_size == 1:
        return f"{turns} prompts"
    return f"{turns} batches of {batch_size} prompts"


def _rule_name(decoder: Decoder) -> str:
    from lenience.rules.names import short_name

    return "the target alone" if decoder.window == 0 else short_name(str(decoder.rule))


def gained(tuned: Tuned) -> str:
    """Return a sentence with the gain of the tuned setting, its loss, and the uncertainty."""
    from lenience.decoding.options import Options

    certificate = tuned.certificate
    speeds = tuned.speeds
    best = certificate.certified
    if best is None or speeds is None:
        return "Nothing is gained: nothing is certified"
    speed = f"{speeds.certified.tokens_per_second:.0f} tokens/s"
    if best.window == 0:
        return f"Nothing is gained: the target alone is the fastest that is certified ({speed})"
    over = {"the target alone": speeds.certified.times(speeds.alone)}
    if best.rule != Options.rule:
        over["the fastest strict decoding"] = speeds.certified.times(speeds.strict)
    ratios = " and ".join(f"{times} {name}" for name, times in over.items())
    over_turns = _turns(speeds.certified, speeds.batch_size)
    speed_text = (
        f"{best.shown_name} at a window of {best.window} makes {speed}: {ratios} "
        f"(95 % over {over_turns}), at a loss of at most "
        f"{certificate.max_drop:.2%} "
        f"with {certificate.confidence:.0%} confidence"
    )
    lossless, times = min(over.items(), key=lambda item: item[1].value)
    if times.high < 1:
        return f"Nothing is gained over {lossless}. {speed_text}"
    if times.low <= 1:
        return f"These prompts show neither a gain nor a loss over {lossless}. {speed_text}"
    return (
        speed_text
        if len(over) > 1
        else f"Strict decoding is the fastest that is certified. {speed_text}"
    )


def print_plan(plan: Plan) -> None:
    """Print the estimated cost of certificates."""
    from lenience.rules.names import short_name

    title = f"to bound the loss by {plan.max_drop:.2%} with confidence {plan.confidence:.0%}"
    table = Table("setting", title=title)
    pilot = f"loss in a pilot of {plan.pilot}"
    for column in (pilot, "tokens/pass", "prompts", "target passes", "minutes"):
        table.add_column(column, justify="right")
    for row in plan.plan:
        cells = [f"{row.pilot_loss:.2%}", f"{row.tokens_per_pass:.2f}"]
        for number in (row.prompts, row.target_passes, row.minutes):
            cells.append("–" if number is None else f"{number:g}")
        table.add_row(escape(short_name(row.rule)), *cells)
    wide(100).print(table)
    least = f"a setting that never loses anything takes {plan.least} prompts"
    say(f"{least}; –: cannot be certified within --horizon")


def print_mined(counts: MinedCounts, task: Task) -> None:
    """Print the contents of a run."""
    parts = [
        counted(counts.samples, "sample"),
        counted(counts.mismatches, "mismatch", "mismatches"),
        f"{counts.important} important",
        f"{counts.abstained} without a label",
    ]
    say(", ".join(parts))
    if counts.unanswered:
        say(
            unanswered(
                counts.unanswered, counts.samples, counts.cut_off, found_by(task)
            )
        )
    if task.grading:
        say(graded(task.grading))


def unanswered(samples: int, of: int, cut_off: int, found: str) -> str:
    """Return the warning that the target's own responses to `samples` of `of` samples hold no
    answer, and the fix. `found` describes how answers are found."""
    text = (
        f"in {samples} of {of} samples no answer is found in the target's own response"
    )
    if not cut_off:
        return f"{text}: look at {found}"
    ends = f"{text}; {cut_off} of these responses end at the length limit"
    further = "" if cut_off == samples else f", and look at {found}"
    return f"{ends}: raise --max-new-tokens{further}"


def print_table(frontier: Frontier) -> None:
    """Print the figures of a comparison."""
    from lenience.evaluation.names import named, why

    n = frontier.rows[0].n
    title = f"{frontier.task}, {counted(n, 'prompt')}, {frontier.machine}"
    table = Table("rule", title=escape(title))
    measure = frontier.measure
    columns = (
        "window",
        measure,
        "paired loss",
        "tokens/pass",
        "tokens/s",
        "s/right answer",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in named(frontier.rows):
        accuracy = _with_interval(row.accuracy, row.accuracy_interval)
        loss = _with_interval(row.paired_loss, row.paired_loss_interval)
        speeds = [
            "–" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
            f"{row.tokens_per_second:.0f}",
            "–"
            if row.seconds_per_correct is None
            else f"{row.seconds_per_correct:.3f}",
        ]
        name = f"{escape(row.name)} [dim]{why(row)}[/]"
        table.add_row(name, str(row.window or "–"), accuracy, loss, *speeds)
    wide(120).print(table)
    for row in named(frontier.rows):
        if row.verdicts:
            said = ", ".join(f"{count} {kind}" for kind, count in row.verdicts.items())
            window = f", window {row.window}" if row.window else ""
            say(f"{row.name}{window}: {said}")
    if frontier.grading:
        say(graded(frontier.grading))
    if frontier.learned_from:
        say(
            f"a judge or the draft learned from {frontier.learned_from} of these {n} "
            "prompts and is better on them than on others: compare on prompts that "
            "were not mined"
        )
    if not any(row.accuracy for row in frontier.rows):
        say(
            f"{measure} is 0 for every decoder, so no loss can be seen: check how "
            "answers are found, and whether they are cut off (--max-new-tokens)"
        )


def print_grades(found: Mapping[str, HumanGrades]) -> None:
    """Print how people graded each setting."""
    for setting, figures in found.items():
        low, high = figures.win_rate_interval
        share = f"{figures.win_rate:.1%} ({low:.1%}–{high:.1%})"
        counts = f"{figures.wins} better, {figures.ties} equally good, {figures.losses} worse"
        say(f"{setting}: {counts} than the target's own; win rate {share}")


def graded(grading: Mapping[str, int]) -> str:
    """Return a line with the counts of a grader's judgements."""
    pairs = grading.get("pairs", 0)
    decided = grading.get("decided", 0)
    otherwise = grading.get("inconsistent", 0)
    unread = grading.get("unread", 0)
    text = (
        f"the grader judged {pairs} pairs of answers that differ: one better in both "
        "orders in "
        f"{decided}, by its place alone in {otherwise}"
    )
    return f"{text}; {unread} replies held no verdict" if unread else text


def _with_interval(share: float, interval: tuple[float, float]) -> str:
    return f"{share:.1%} [dim]{interval[0]:.1%}–{interval[1]:.1%}[/]"


def print_answer(pair: Pair, out: Generation, coloured: bool) -> None:
    """Print an answer on standard output; if `coloured`, with each token coloured by its origin."""
    from lenience.decoding.response import pieces

    if not coloured:
        print(out.text)
        return
    console = Console(
        force_terminal=True if sys.stdout.isatty() else None, soft_wrap=True
    )
    plain = console.no_color or not console.is_terminal
    for text, entry in zip(pieces(pair.target, out.tokens), out.trace):
        before, after = MARKS[entry.origin] if plain else ("", "")
        console.print(Text(f"{before}{text}{after}", STYLES[entry.origin]), end="")
    console.print("\n")
    for origin, style in STYLES.items():
        before, after = MARKS[origin] if plain else (" ", " ")
        console.print(
            f"{before}{origin}{after}",
            style=style,
            end="",
            markup=False,
            highlight=False,
        )
        console.print("  ", end="")
    console.print()


def print_counts(out: Generation, picked: bool = False) -> None:
    """Print an answer's token and pass counts. `picked` adds the window that was picked."""
    passes = [
        f"{counted(out.target_passes, 'pass', 'passes')} of the target",
        f"{out.tokens_per_pass:.2f} tokens per pass",
        f"{out.accepted_lenient} gained by lenience",
    ]
    counts = [
        counted(len(out.tokens), "token"),
        f"{out.tokens_per_second:.0f} tokens/s",
        *(
            passes
            if out.target_passes
            else [f"{counted(out.draft_passes, 'pass', 'passes')} of the draft alone"]
        ),
        f"ended by {out.finish}",
        *([] if out.seed is None else [f"seed {out.seed}"]),
    ]
    stop = "" if out.stop == "fixed" else f", with stop {out.stop}"
    tree = "" if out.tree == "chain" else f", with tree {out.tree}"
    more = (
        f"; window {out.window} was picked as the fastest here{stop}{tree}"
        if picked
        else ""
    )
    screen.print(f"[dim]{', '.join(counts)}{more}[/]", soft_wrap=True)


def print_profile(profile: Profile) -> None:
    """Print the wall-clock time of a cycle by component."""
    table = Table("where the time goes", box=None)
    for column in ("ms a cycle", "share"):
        table.add_column(column, justify="right")
    whole = sum(profile.seconds.values())
    for part, seconds in (*profile.seconds.items(), ("all", whole)):
        a_cycle = f"{1e3 * seconds / profile.cycles:.3f}"
        table.add_row(PARTS.get(part, part), a_cycle, f"{seconds / whole:.1%}")
    screen.print(table)


def print_audit(watch: Audit, state: State, again: int) -> None:
    """Print the state of an audit; `again` is the number of rows that had been audited before."""
    low, high = state.interval
    present = "which has changed on the way"
    if low <= high:
        present = f"at present in {low:.2%}–{high:.2%}"
    said = f"{state.audited} of {counted(state.seen, 'prompt')} audited"
    if state.unreferenced:
        said += f", {state.unreferenced} without a reference, of which the disagreement counts"
    certified = f"certified: at most {watch.certificate.max_drop:.2%}"
    said += f": loss {state.losses:g}, {present} ({certified})"
    say(said + (f"; {again} had been audited before" if again else ""))
    if not state.drifted:
        return
    if state.unreferenced:
        screen.print(
            f"[red]the answers differ more than was certified; {state.unreferenced} of "
            "them had "
            "no reference and may differ without being wrong: give references, or "
            "decode "
            "strictly and certify again[/]"
        )
    else:
        screen.print(
            "[red]drift: the certificate no longer holds for these prompts; decode "
            "strictly and "
            "certify again[/]"
        )


def print_mixture(head: Head, folder: Path) -> None:
    """Print how the rewards and the rejections changed while a mixture was trained, and the command
    that uses it."""
    history = head.metrics["history"]
    part = max(1, len(history) // 5)
    columns = ("updates", "right answers", "rejected tokens, expected")
    table = Table(*columns, box=None)
    for name, rows in (
        ("the first fifth", history[:part]),
        ("the last", history[-part:]),
    ):
        reward = sum(row["reward"] for row in rows) / len(rows)
        rejected = sum(row["rejected"] for row in rows) / len(rows)
        table.add_row(name, f"{reward:.1%}", f"{rejected:.1%}")
    screen.print(table)
    say(f"use it as --rule diversed:{folder}")


def print_thresholds(head: Head, folder: Path) -> None:
    """Print the thresholds of a trained head, their figures, and the command that uses it."""
    printers = {"judge": _print_judge, "stop": _print_stop, "gate": _print_gate}
    printers[head.role](head, folder)


def _print_judge(head: Head, folder: Path) -> None:
    from lenience.heads.scores import TELLING
    from lenience.rules.judge import Judge
    from lenience.rules.names import bound_text

    columns = (
        "recall of important",
        "its interval",
        "threshold",
        "unimportant accepted",
    )
    table = Table(*columns, box=None)
    for alike in _alike(head.metrics["thresholds"]):
        first = alike[0]
        last = alike[-1]
        recalls = dict.fromkeys(f"{row['recall']:g}" for row in (first, last))
        low, high = last["recall_interval"]
        cells = bound_text(last["threshold"]), f"{last['accepted']:.3f}"
        table.add_row("–".join(recalls), f"{low:.3f}–{high:.3f}", *cells)
    screen.print(table)
    say(_auc(head))
    if _is_chance(head):
        say(
            "the scores do not separate important tokens from others, so no threshold "
            "pays: learn from "
            "more samples, or read other states (--models, --tokens, --layer)"
        )
    own = f"its own threshold is {bound_text(head.threshold)}"
    say(f"use it as {Judge(str(folder), recall=0.98)}, or @T with a threshold; {own}")
    important = head.metrics["important"]
    if important < TELLING:
        mined = len(head.prompts or ()) or head.metrics["samples"]
        samples = -(-mined * TELLING // important)
        say(
            f"{important} important mismatches are few for strict thresholds: "
            f"{TELLING} are needed to tell a recall of 0.99 from 1, so mine about "
            f"{samples} samples"
        )


def print_curve(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a head's metrics by number of training samples, and the expected gain of more
    samples."""
    from lenience.training.fit import CURVE_RECALL

    accepts = f"unimportant accepted at a recall of {CURVE_RECALL:g}"
    table = Table("samples", "important", "AUC out of fold", accepts, box=None)
    for row in rows:
        low, high = row["auc_interval"]
        auc = f"{row['auc_out_of_fold']:.3f} ({low:.3f}–{high:.3f})"
        table.add_row(
            str(row["samples"]), str(row["important"]), auc, f"{row['accepted']:.3f}"
        )
    screen.print(table)
    if len(rows) > 1:
        half, whole = rows[-2:]
        auc = whole["auc_out_of_fold"] - half["auc_out_of_fold"]
        accepted = whole["accepted"] - half["accepted"]
        say(
            f"doubling to {whole['samples']} samples changed the AUC by {auc:+.3f} and the "
            f"accepted share by {accepted:+.3f}; doubling again usually changes less"
        )


def print_skipped(found: Sequence[Skipped]) -> str:
    """Print the value of skipping layers, and return the best drafter."""
    table = Table("layers left out", title="the target without layers as its draft")
    for column in ("tokens that agree", "window", "times the target alone"):
        table.add_column(column, justify="right")
    for raced in found:
        left_out = ", ".join(map(str, raced.layers))
        cells = (
            f"{raced.agreement:.1%}",
            str(raced.window or "–"),
            f"{raced.times:.2f}",
        )
        table.add_row(left_out, *cells)
    wide(100).print(table)
    best = max(found, key=lambda raced: raced.times)
    drafter = f"skip:{','.join(map(str, best.layers))}"
    if best.times > 1:
        say(
            f"use it as --drafter {drafter} --window {best.window}; compare it before "
            "you trust it"
        )
    else:
        say("leaving layers out does not pay: use another drafter")
    return drafter


def print_drafter(kind: str, metrics: Mapping[str, Any], folder: Path) -> None:
    """Print the figures of a trained drafter on the samples held out, and the command that uses
    it."""
    if kind == "model":
        return _print_distilled(metrics, folder)
    table = Table("drafted token", "right", box=None)
    for number, share in enumerate(metrics["accuracy"], 1):
        table.add_row(str(number), f"{share:.3f}")
    screen.print(table)
    kept = metrics["tokens_per_pass"]
    held_out = metrics["held_out"]
    target = ""
    if "agreement" in metrics:
        say(
            f"the fine-tuned target still predicts {metrics['agreement']:.1%} of its "
            "tokens"
        )
        target = f"--target {folder / 'target'} "
    say(
        f"{kept:.2f} tokens per pass on {held_out} samples held out, strictly; use it "
        "as "
        f"{target}--drafter {kind}:{folder}"
    )


def _print_distilled(metrics: Mapping[str, Any], folder: Path) -> None:
    from lenience.training.distillation import WINDOW

    before = metrics["before"]
    table = Table("", "before", "now", box=None)
    for key, what in (
        ("agreement", "tokens accepted, greedily"),
        ("acceptance", "tokens accepted, at temperature 1"),
        ("tokens_per_pass", f"tokens per pass, greedily, window {WINDOW}"),
    ):
        table.add_row(what, f"{before[key]:.3f}", f"{metrics[key]:.3f}")
    screen.print(table)
    say(f"on {metrics['held_out']} samples held out; use it as --draft {folder}")


def print_trees(found: Acceptance, path: Path) -> dict[str, float]:
    """Print acceptance rates and the best trees by size, and return the trees."""
    from lenience.drafting.trees.planning import best_shape

    table = Table("drafted before", *(f"rank {i + 1}" for i in range(4)), box=None)
    for depth, shares in enumerate(found.shares):
        table.add_row(str(depth), *(f"{share:.3f}" for share in shares[:4]))
    screen.print(table)
    draw = f",draw={found.draw}" if found.draw else ""
    planned = {}
    for nodes in (4, 8, 16, 32, 64):
        planned[f"planned:{nodes},path={path}{draw}"] = (
            1 + best_shape(found.shares, nodes)[1]
        )
    for tree, kept in planned.items():
        say(f"--tree {tree}: {kept:.2f} tokens per pass expected")
    return planned


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the rows, grouped by runs of equal thresholds."""
    return [list(some) for _, some in groupby(rows, key=lambda row: row["threshold"])]


def _print_stop(head: Head, folder: Path) -> None:
    from lenience.drafting.stops import Likely

    rejected = head.metrics["important"]
    tokens = head.metrics["mismatches"]
    use = f"use it as --stop {Likely(str(folder), head.threshold)}"
    say(
        f"{tokens} tokens, {rejected / tokens:.1%} of them rejected; {_auc(head)}; "
        f"{use}"
    )


def _print_gate(head: Head, folder: Path) -> None:
    from lenience.drafting.stops import Gate
    from lenience.rules.names import probability

    tau = head.metrics["tau"]
    tokens = head.metrics["mismatches"]
    table = Table(
        "threshold", "acceptable tokens let through", "others let through", box=None
    )
    for row in head.metrics["thresholds"]:
        cells = f"{row['accepted']:.3f}", f"{1 - row['recall']:.3f}"
        table.add_row(probability(row["threshold"]), *cells)
    screen.print(table)
    share = head.metrics["important"] / tokens
    say(
        f"{tokens} tokens; to {share:.1%} of them the draft gives more than {tau:g} "
        f"times the target's probability; {_auc(head)}; use it as --stop "
        f"{Gate(str(folder), head.threshold)}"
    )


def _is_chance(head: Head) -> bool:
    """Return True if the interval of a head's AUC begins at or below one half."""
    low, _ = head.metrics["auc_interval"]
    return bool(low <= 0.5)


def _auc(head: Head) -> str:
    low, high = head.metrics["auc_interval"]
    auc = head.metrics["auc_out_of_fold"]
    return f"AUC {auc:.3f} ({low:.3f}–{high:.3f}) cross-validated"
