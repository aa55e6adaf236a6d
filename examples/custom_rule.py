"""Write an acceptance rule: accept a token that is nearly as probable as the best one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import lenience
from lenience.core.context import Context
from lenience.core.types import Draft, Reading
from lenience.rules.base import Lenient, gather_tokens
from lenience.rules.combine import as_rule


@dataclass(frozen=True)
class Near(Lenient):
    """Accept a token whose probability is at most `distance` under the largest one."""

    distance: float
    name = "near"
    bounds: ClassVar = {"distance": (0, 1)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """Return [B, W] bool: which drafted tokens are accepted."""
        probs = ctx.log_probs(reading.logits[:, :-1]).exp()  # [B, W, V]
        return gather_tokens(probs, draft.tokens) >= probs.amax(-1) - self.distance


def main() -> None:
    pair = lenience.load_pair()
    prompt = (
        "Ann has 12 apples. Bob has 5 more apples than Ann. How many has Bob? Answer:"
    )
    for distance in (0.0, 0.3, 0.9):
        out = pair.generate(prompt, rule=as_rule(Near(distance)), window=8)
        print(
            f"distance {distance}: {out.tokens_per_pass:.2f} tokens per pass\n{out.text}\n"
        )


if __name__ == "__main__":
    main()
