"""Draw README's picture of one answer by three decoders, each token coloured by its origin.

    python tools/picture.py [docs/tokens.svg]

The answers are decoded now, on the built-in pair; passes and tokens are counted, not timed.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from lenience import load_pair
from lenience.cli.live import SETTINGS
from lenience.decoding.response import pieces
from lenience.tasks import WordMath

PROBLEM = 17
"""Number of the test problem: three steps, all of which both wordings can tell."""
WIDTH = 100
STYLES = {
    "draft": "#172554 on #93c5fd",
    "draft-lenient": "bold #052e16 on #86efac",
    "correction": "#450a0a on #fca5a5",
    "bonus": "#111827 on #e5e7eb",
}
LEGEND = {
    "draft": "drafted, matches the target",
    "draft-lenient": "drafted, accepted by the judge",
    "correction": "correction",
    "bonus": "target's own",
}
FONT = re.compile(r"@font-face \{\{.*?\}\}", re.S)
"""The format's fonts from the web, which pictures on GitHub cannot load."""


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/tokens.svg")
    pair = load_pair()
    sample = [*zip(range(PROBLEM + 1), WordMath().samples("test"))][-1][1]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(str(sample.prompt), style="italic"))
    for setting in SETTINGS:
        out = pair.generate(str(sample.prompt), **setting.options)
        text = Text()
        for piece, entry in zip(pieces(pair.target, out.tokens), out.trace):
            text.append(piece, STYLES[entry.origin])
        right = "right" if WordMath().correct(out.text, sample) else "wrong"
        title = (
            f"{setting.title}: {out.target_passes} passes of the target for "
            f"{len(out.tokens)} tokens, {right}"
        )
        console.print(Panel(text, title=title, title_align="left"))
    for origin, meaning in LEGEND.items():
        console.print(Text(f" {meaning} ", STYLES[origin]), end="  ")
    console.print()
    svg = console.export_svg(
        title="lenience generate --show", code_format=FONT.sub("", CONSOLE_SVG_FORMAT)
    )
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
