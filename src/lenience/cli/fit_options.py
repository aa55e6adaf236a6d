"""What `lenience fit` is asked: judges, heads that end drafting, drafters and plans of trees."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lenience.cli.options import Flag
from lenience.core.errors import InputError

if TYPE_CHECKING:
    from lenience.heads.head import Inputs, Role
    from lenience.training.acceptance import TreeSampling
    from lenience.training.fit import HeadPlan
    from lenience.training.fit_drafter import DrafterPlan

MOST_HEADS = 32
"""Of a drafter."""


@Parameter(name="*")
@dataclass
class FitFlags:
    head: Literal["logistic", "mlp", "adam", "adamw"] | None = None
    """logistic, as AutoJudge has it; mlp, with a hidden layer, which tells better where there is
    much to learn from; adamw, as Judge Decoding has it, the default for annotated answers; or adam,
    as SPRINTER has it, the default for a gate."""
    recall: float | None = None
    """The share of important tokens that the judge's own threshold must reject, 0.9 by default;
    other thresholds are listed too. Of annotated answers the threshold is 0.5 where this is not
    given, as in the paper."""
    models: str | None = None
    """Whose hidden states a judge reads: target, draft or, by default, both, with a comma."""
    tokens: str | None = None
    """After which token was read: draft (the drafted one), previous, target (for study only), or
    several, with a comma. By default a judge reads draft, as AutoJudge has it, and draft,previous
    with --head mlp or --ahead; a gate and a stop read previous, as draft costs these one more pass
    of the draft."""
    layer: str | None = None
    """Let a judge read the target's states after this layer, or several with a comma: a number, -1
    being the last, before the final norm, or norm, after it. By default norm, and -1 for annotated
    answers."""
    ahead: int | None = None
    """Let a judge also read what the models' logits say of the drafted token and of up to so many
    tokens drafted after it, which the target has read anyway."""
    from_: Annotated[Literal["run", "annotated"], Parameter(name="--from")] = "run"
    """What to learn from: a run's mined mismatches, or annotated answers (Judge Decoding)."""
    stop: Flag = False
    """Fit a head on the draft's states that says when to stop drafting, used as --stop
    head:RUN/stop@T."""
    of: str | None = None
    """With --stop: the rule that will decode, whose rejections it learns, such as
    judge:RUN/judge@0.99; by default those of the strict rule."""
    gate: Flag = False
    """Fit a head that also says which tokens need no asking the target, used as --stop
    gate:RUN/gate@T (SPRINTER)."""
    drafter: Literal["medusa", "blockwise", "eagle", "model", "skip"] | None = None
    """Fit a drafter to the target's own answers in the run, used as --drafter medusa:RUN/medusa:
    medusa, heads on the target's last state, each with a vocabulary matrix of its own; blockwise,
    heads that share the target's; eagle, a layer on the target's states (EAGLE-3). model aligns the
    draft model, used as --draft RUN/model (DistillSpec). skip looks for the layers that the target
    can leave out, and names them."""
    distill: Literal["forward-kl", "reverse-kl", "on-policy"] | None = None
    """With --drafter model: forward-kl, the target's divergence from the draft (the default), or
    reverse-kl, the draft's from the target, along the target's answers; or on-policy, the first
    along answers that the draft samples itself."""
    only_rejected: Flag = False
    """With --drafter model: learn only from tokens that would be rejected (Online Speculative
    Decoder)."""
    tune_target: Flag = False
    """With --drafter blockwise: let a copy of the target learn with its heads, which is another
    target then, in RUN/blockwise/target (Blockwise Parallel Decoding's fine-tuning)."""
    epochs: int | None = None
    """With --drafter: how often all answers are learned from; by default 30 for medusa and
    blockwise, 10 for eagle, 5 for model."""
    tree: Flag = False
    """Measure what trees are planned by, used as --tree planned:16,path=RUN/tree.json."""
    with_: Annotated[str | None, Parameter(name="--with")] = None
    """With --tree: the drafter that is measured; the draft model by default."""
    draw: Literal["with-replacement", "without-replacement"] | None = None
    """With --tree: measure by trees whose tokens are drawn, as planned:16,draw=… draws them."""
    temperature: float | None = None
    """With --draw: at which is drawn; 1 by default."""
    heads: int | None = None
    """With --drafter medusa or blockwise: how many, each predicting a token further ahead; 4 by
    default."""
    tau: float | None = None
    """A token is acceptable to the gate where draft / target of its probabilities is at most this,
    1 by default."""
    also: tuple[Path, ...] = ()
    """Another run of the same pair to learn from; may be given again."""
    fold: int | None = None
    """Leave out a fifth of a benchmark's problems, 0 to 4: those that the task tests with
    fold=K, so that five judges decode all of it out of fold."""
    soft: Flag = False
    """Let a judge learn from how often resampled continuations changed the answer (mine
    --resamples), and not only from whether the greedy one did."""
    curve: Flag = False
    """Say what the head comes to when fitted to an eighth, a quarter, a half and all of the
    samples, and so what more of them would bring; save none."""
    out: Path | None = None
    """Save the head in another folder."""
    weight: float | None = None
    """How much an important, rejected or unacceptable token counts in the fit against another one:
    1 by default, with --head adamw so much that both kinds count alike; SpecDec++'s stop has 6,
    with --tokens draft."""
    seed: int = 0
    """Of the split."""
    target: str | None = None
    """Where the target is now; by default where the run was mined."""
    draft: str | None = None
    """Where the draft is now."""
    device: str = "auto"
    """cpu, cuda, …"""

    @property
    def annotated(self) -> bool:
        return self.from_ == "annotated"

    @property
    def role(self) -> Role:
        return "stop" if self.stop else "gate" if self.gate else "judge"

    def drafter_plan(self, run: Path) -> DrafterPlan:
        """Return the drafter's heads that are asked for. Raises InputError for what does not go
        together."""
        from lenience.training.fit_drafter import DrafterPlan

        assert self.drafter is not None and self.drafter != "skip"
        ours = (
            "heads",
            "distill",
            "only_rejected",
            "tune_target",
            "epochs",
            "out",
            "seed",
        )
        self._refuse_others("drafter", *ours, what="another head than --drafter's")
        if self.heads is not None and self.drafter in ("eagle", "model"):
            raise InputError(f"--heads: {self.drafter} has none; leave it out")
        if self.heads is not None and not 1 <= self.heads <= MOST_HEADS:
            raise InputError(f"--heads {self.heads}: must be from 1 to {MOST_HEADS}")
        if self.epochs is not None and self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: must be 1 or more")
        for flag, given in (
            ("distill", self.distill),
            ("only-rejected", self.only_rejected),
        ):
            if given and self.drafter != "model":
                raise InputError(f"--{flag}: is of --drafter model; leave it out")
        if self.tune_target and self.drafter != "blockwise":
            raise InputError("--tune-target: is of --drafter blockwise; leave it out")
        return DrafterPlan(
            self.drafter,
            self.out or run / self.drafter,
            heads=self.heads or 4,
            distill=self.distill or "forward-kl",
            only_rejected=self.only_rejected,
            tune_target=self.tune_target,
            epochs=self.epochs,
            seed=self.seed,
        )

    def check_skip(self) -> None:
        """Raise InputError for what does not go together with `drafter` skip."""
        self._refuse_others(
            "drafter", what="what is fitted, and --drafter skip only looks"
        )

    def drawn(self) -> TreeSampling | None:
        """Return how the tokens of a measured tree are drawn; None where they are chosen. Raises
        InputError for what does not go together with `tree`."""
        from lenience.training.acceptance import TreeSampling

        ours = ("tree", "with_", "draw", "temperature")
        self._refuse_others(*ours, what="a head, and --tree fits none")
        if self.draw is None:
            if self.temperature is not None:
                raise InputError(
                    "--temperature: is of trees that are drawn; give --draw too"
                )
            return None
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 < temperature < math.inf:
            raise InputError(
                f"--temperature {temperature:g}: must be above 0 where --draw draws"
            )
        return TreeSampling(self.draw, temperature)

    def _refuse_others(self, *names: str, what: str) -> None:
        """Raise InputError where other options are given than these and those of the models."""
        usual = FitFlags()
        for item in fields(self):
            if item.name in (*names, "target", "draft", "device"):
                continue
            if getattr(self, item.name) != getattr(usual, item.name):
                flag = item.name.rstrip("_").replace("_", "-")
                raise InputError(f"--{flag}: is of {what}; leave it out")

    def plan(self, run: Path) -> HeadPlan:
        """Return the head that is asked for. Raises InputError for what does not go together."""
        from lenience.heads.fitting import FitConfig
        from lenience.training.fit import HeadPlan

        self._check()
        role = self.role
        default = "adam" if self.gate else "logistic"
        kind: Any = self.head or ("adamw" if self.annotated else default)
        folder = self.out or (run.with_suffix("") if self.annotated else run) / role
        if self.from_ == "run" and run.is_file():
            mend = "name a run folder or, for annotated answers, give --from annotated"
            raise InputError(f"{run}: is a file; {mend}")
        file = next(
            (parent for parent in (folder, *folder.parents) if parent.is_file()), None
        )
        if file:
            raise InputError(f"--out {folder}: {file} is a file; name another folder")
        recall = self.recall
        if recall is None and not self.annotated:
            recall = FitConfig.recall
        config = FitConfig(kind, role, recall, weight=self.weight, seed=self.seed)
        from lenience.decoding.decoder import read_rule

        return HeadPlan(
            self._inputs(),
            folder,
            config,
            tau=self.tau or 1.0,
            also=self.also,
            soft=self.soft,
            of=None if self.of is None else read_rule(self.of),
        )

    def _check(self) -> None:
        for name in ("heads", "distill", "only_rejected", "tune_target", "epochs"):
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: is of what --drafter fits; name that too")
        for flag, given in (
            ("with", self.with_),
            ("draw", self.draw),
            ("temperature", self.temperature),
        ):
            if given is not None:
                raise InputError(f"--{flag}: is of what --tree measures; name that too")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise InputError(f"--recall {self.recall}: must be in (0, 1]")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be from 0 to 2**32 - 1")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise InputError(f"--weight {self.weight:g}: must be above 0")
        if self.stop and self.gate:
            raise InputError(
                "--gate: is another head than --stop's; fit them one after the other"
            )
        if self.curve and self.annotated:
            raise InputError("--curve: is of mined samples; leave it out")
        if self.soft and (self.annotated or self.role != "judge"):
            raise InputError("--soft: is for judges of mined mismatches; leave it out")
        if self.also and self.annotated:
            raise InputError("--also: is for runs that were mined; leave it out")
        if self.of is not None:
            self._check_of(self.of)
        if self.tau is not None and not (self.gate and self.tau > 0):
            raise InputError(f"--tau {self.tau:g}: is a gate's, and above 0")

    def _check_of(self, rule: str) -> None:
        from lenience.rules.baselines import BASELINES
        from lenience.runs.certificate import refuse_certified

        if not self.stop:
            raise InputError("--of: says what a stop learns from; give --stop too")
        if rule in BASELINES:
            raise InputError(f"--of {rule}: rejects nothing; name a rule that drafts")
        refuse_certified([rule])

    def _inputs(self) -> Inputs:
        """Return what the head reads, by what was said and else by default."""
        from lenience.heads.head import Inputs

        role = self.role
        models = self.models
        tokens = self.tokens
        if self.ahead is not None and (self.annotated or role != "judge"):
            raise InputError("--ahead: is for judges of mined mismatches; leave it out")
        if self.annotated:
            if (
                role != "judge"
                or models not in (None, "target")
                or tokens not in (None, "draft")
            ):
                raise InputError(
                    "--from annotated: fits a judge to the target's states after each token; "
                    "leave the others out"
                )
            return Inputs(("target",), ("draft",), self._layers("-1"))
        if role != "judge" and models:
            raise InputError(
                f"--{role}: is fitted to the draft's own states; leave --models out"
            )
        if role != "judge" and tokens not in (None, "draft", "previous"):
            raise InputError(
                f"--tokens {tokens}: a {role} reads the state after draft or after previous"
            )
        as_published = self.head in (None, "logistic") and self.ahead is None
        of_judge = "draft" if as_published else "draft,previous"
        defaults = {"judge": of_judge, "stop": "previous", "gate": "previous"}
        whose = models or ("target,draft" if role == "judge" else "draft")
        read_after = tokens or defaults[role]
        models_read = tuple(whose.split(","))
        tokens_read = tuple(read_after.split(","))
        return Inputs(models_read, tokens_read, self._layers("norm"), self.ahead)

    def _layers(self, usual: str) -> tuple[int | None, ...]:
        named = (self.layer or usual).split(",")
        try:
            return tuple(None if layer == "norm" else int(layer) for layer in named)
        except ValueError:
            raise InputError(
                f"--layer {self.layer}: name numbers, or norm, with commas"
            ) from None
