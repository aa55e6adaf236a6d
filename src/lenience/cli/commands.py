"""Table of the commands. Commands import torch only when they need it."""

from __future__ import annotations

import os
import sys
import warnings

import cyclopts
from cyclopts import App, Group, Parameter

from lenience.cli.decode import chat, demo, generate
from lenience.cli.learn import annotate, datastore, fit, init, mine, push
from lenience.cli.lists import drafters, rules, tasks
from lenience.cli.measure import audit, certify, compare, grade, tune
from lenience.cli.prompts import STDIN
from lenience.cli.serve import serve
from lenience.core.errors import InputError, RunError, first_line
from lenience.core.version import VERSION

app = App(
    name="lenience",
    help="Speculative decoding that learns which draft tokens do not matter for your task.",
    version=VERSION,
    default_parameter=Parameter(negative_iterable=()),
)
GROUPS = {
    Group("Decode", sort_key=1): (demo, generate, chat),
    Group("Serve", sort_key=2): (serve,),
    Group("Train", sort_key=3): (init, mine, annotate, fit, datastore),
    Group("Compare and certify", sort_key=4): (compare, grade, certify, tune, audit),
    Group("Share", sort_key=5): (push,),
    Group("Look up", sort_key=6): (rules, drafters, tasks),
}
"""Groups of commands in the help."""
GO_ON = (demo, mine, fit, compare, certify, tune, audit)
"""Commands that resume."""
COMMAND_EXAMPLES = {
    "demo": "lenience demo --out demo",
    "generate": 'lenience generate "…" --rule certified:run --show',
    "chat": "lenience chat --target org/target --draft org/draft",
    "serve": "lenience serve --rule certified:run",
    "init": "lenience init run --target org/target --draft org/draft --task rows.jsonl "
    "--answer number-after:####",
    "mine": "lenience mine --out run --limit 1000 --target org/target --draft org/draft "
    "--task rows.jsonl --answer number-after:####",
    "annotate": "lenience annotate report",
    "fit": "lenience fit run --head mlp --ahead 12",
    "datastore": "lenience datastore corpus.jsonl --out store --target org/target",
    "compare": "lenience compare --run run --rule exact --rule judge:run/judge@0.99 --out report",
    "grade": "lenience grade report --take grades.json",
    "certify": "lenience certify run --max-drop 0.01",
    "tune": "lenience tune run --max-drop 0.01",
    "audit": "lenience audit run live.jsonl --share 0.05",
    "push": "lenience push run/judge org/name --license apache-2.0",
    "rules": "lenience rules",
    "drafters": "lenience drafters",
    "tasks": "lenience tasks",
}
"""An example of each command, in the order of use."""
for group, functions in GROUPS.items():
    for function in functions:
        name = function.__name__
        app.command(
            function,
            group=group,
            sort_key=list(COMMAND_EXAMPLES).index(name),
            help_epilogue=f"Example: {COMMAND_EXAMPLES[name]}",
        )


START = """\
lenience makes language models answer faster by speculative decoding. It learns which draft
tokens do not matter for your task, accepts them, and bounds what that costs.

Look at it (built-in pair, no download):
  lenience demo --quick            a live race in 30 seconds
  lenience demo                    every step in two minutes

Use it on your models and task:
  lenience init run --target org/target --draft org/draft --task rows.jsonl --answer last-number
  lenience mine --out run --limit 1000
  lenience fit run
  lenience tune run --max-drop 0.01
  lenience generate "…" --rule certified:run --show

Look things up:
  lenience rules, lenience drafters, lenience tasks, lenience --help, lenience COMMAND --help
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status: 0 done, 1 the run failed, 2 the arguments or the input are
    wrong."""
    warnings.formatwarning = lambda message, *_, **__: f"lenience: {message}\n"
    given = sys.argv[1:] if argv is None else argv
    if not given:
        print(START, end="")
        return
    # "-" would be taken for a flag
    given = [STDIN if argument == "-" else argument for argument in given]
    try:
        command, bound, _ = app.parse_args(
            given, exit_on_error=False, print_error=False
        )
        command(*bound.args, **bound.kwargs)
    except (InputError, cyclopts.CycloptsError) as error:
        _fail(first_line(error), 2)
    except KeyboardInterrupt:
        kept = "; finished work is kept, and the same command resumes"
        _fail("stopped" + (kept if command in GO_ON else ""), 1)
    except RunError as error:
        _fail(first_line(error), 1)
    except Exception as error:
        if os.environ.get("LENIENCE_DEBUG"):
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        _fail(f"{what} (LENIENCE_DEBUG=1 shows where)", 1)


def _fail(message: str, status: int) -> None:
    print(f"lenience: {message}", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
