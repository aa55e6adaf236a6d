"""What is printed: tables, answers, counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lenience.cli.console import screen

if TYPE_CHECKING:
    from lenience.core.profile import Profile
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.heads.head import Head


STYLES = {
    "draft": "black on bright_blue",
    "draft-lenient": "bold black on bright_green",
    "draft-trusted": "black on bright_yellow",
    "correction": "black on bright_red",
    "bonus": "black on white",
}
"""Of tokens, by where they came from."""


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
