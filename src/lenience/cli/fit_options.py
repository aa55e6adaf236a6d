"""Options of `lenience fit`: judges, heads that end drafting, drafters and plans of trees."""

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
    from lenience.training.mixture import MixturePlan

MOST_HEADS = 32
"""Maximum number of heads of a drafter."""
OF_DRAFTERS = (
    "heads",
    "distill",
    "only_rejected",
    "layers",
    "draft_vocab",
    "tune_target",
    "epochs",
)
"""Flags that apply to drafters only."""


@Parameter(name="*")
@dataclass
class FitFlags:
    head: Literal["logistic", "mlp", "adam", "adamw"] | None = None
    """Kind of head: logistic (AutoJudge, the default), mlp (one hidden layer; better with many
    samples), adamw (Judge Decoding, the default for annotated answers) or adam (SPRINTER, the
    default for a gate)."""
    recall: float | None = None
    """Share of important tokens that the judge's own threshold must reject. Default: 0.9. Other
    thresholds are listed too. For annotated answers the default threshold is 0.5, as in the
    paper."""
    models: str | None = None
    """Models whose hidden states a judge reads: target, draft or target,draft. Default: all models
    of the run."""
    tokens: str | None = None
    """Tokens after which states are read: draft (the drafted token), previous, target (for studies
    only), or several, separated by commas. Default: draft for a logistic judge or with annotated
    answers, draft,previous for another judge or with --ahead, and previous for a gate or a stop,
    for which draft costs another pass of the draft."""
    layer: str | None = None
    """Layers of the target whose states a judge reads, separated by commas: a number (-1 is the
    last layer, before the final norm) or norm (after it). Default: norm; -1 for annotated
    answers."""
    ahead: int | None = None
    """Number of later drafted tokens whose logits a judge also reads, together with those of the
    judged token. The target computes them anyway."""
    from_: Annotated[Literal["run", "annotated"], Parameter(name="--from")] = "run"
    """Training data: a run's mined mismatches, or annotated answers (Judge Decoding)."""
    stop: Flag = False
    """Train a head on the draft's states that ends drafting, used as --stop head:RUN/stop@T."""
    of: str | None = None
    """Rule whose rejections a --stop head learns, such as judge:RUN/judge@0.99. Default: the strict
    rule."""
    gate: Flag = False
    """Train a gate, which ends drafting and also marks tokens that skip verification, used as
    --stop gate:RUN/gate@T (SPRINTER)."""
    mixture: Flag = False
    """Train a head that weighs the target against the draft at each position, used as
    --rule diversed:RUN/mixture (DIVERSED). It learns from which of its answers are right."""
    drafter: Literal["medusa", "blockwise", "eagle", "model", "skip"] | None = None
    """Drafter to train on the target's answers in the run. medusa (heads with their own vocabulary
    matrices), blockwise (heads that share the target's matrix) and eagle (a layer on the target's
    states, EAGLE-3) are used like --drafter medusa:RUN/medusa. model distils the draft model, used
    as --draft RUN/model (DistillSpec). skip searches for layers that the target can leave out."""
    distill: Literal["forward-kl", "reverse-kl", "on-policy"] | None = None
    """Loss for --drafter model: forward-kl (KL(target ‖ draft) along the target's answers, the
    default), reverse-kl, or on-policy (forward KL along answers that the draft samples)."""
    only_rejected: Flag = False
    """Train --drafter model only on tokens that would be rejected (Online Speculative Decoding)."""
    layers: str | None = None
    """Layers of the target to cut a draft out of for --drafter model, counted from 0 and separated
    by commas, such as 0,1,28,29; or their number, such as 4, to choose them on the run's answers.
    Default: distil the run's draft model."""
    draft_vocab: int | None = None
    """Number of tokens that --drafter model (with --layers), eagle or medusa can predict: the most
    frequent ones of the run's answers. A smaller LM head drafts faster. Default: all."""
    tune_target: Flag = False
    """Fine-tune a copy of the target together with its --drafter blockwise heads, saved in
    RUN/blockwise/target (Blockwise Parallel Decoding). The copy counts as another target."""
    epochs: int | None = None
    """Number of epochs for --drafter. Default: 30 for medusa and blockwise, 10 for eagle, 5 for
    model."""
    tree: Flag = False
    """Measure acceptance by rank and depth, from which --tree planned:16,path=RUN/tree.json is
    planned."""
    with_: Annotated[str | None, Parameter(name="--with")] = None
    """Drafter to measure with --tree. Default: the draft model."""
    draw: Literal["with-replacement", "without-replacement"] | None = None
    """Method of drawing the tokens of the measured --tree, as in planned:16,draw=…"""
    temperature: float | None = None
    """Sampling temperature for --draw. Default: 1."""
    heads: int | None = None
    """Number of heads for --drafter medusa or blockwise; each predicts one token further ahead.
    Default: 4."""
    tau: float | None = None
    """Largest ratio of draft to target probability at which a token counts as acceptable to the
    gate. Default: 1."""
    also: tuple[Path, ...] = ()
    """Further run of the same pair to learn from; may be repeated."""
    fold: int | None = None
    """Fifth of a benchmark's problems to leave out of training, 0 to 4: the problems that the task
    tests with fold=K. Five judges can then decode all problems out of fold."""
    soft: Flag = False
    """Train a judge on the share of resampled continuations that changed the answer (mine
    --resamples). Default: train on whether the greedy continuation changed it."""
    curve: Flag = False
    """Print the head's figures when trained on an eighth, a quarter, a half and all of the samples,
    and what more samples would bring. Saves nothing."""
    out: Path | None = None
    """Folder for the head. Default: a folder in the run."""
    weight: float | None = None
    """Weight of an important, rejected or unacceptable token relative to other tokens. Default: 1;
    balanced with --head adamw. SpecDec++ uses 6 for its stop, with --tokens draft."""
    seed: int = 0
    """Random seed for splitting samples."""
    target: str | None = None
    """Hub name or folder of the target. Default: the run's."""
    draft: str | None = None
    """Hub name or folder of the draft. Default: the run's."""
    device: str = "auto"
    """Device: cpu, cuda, …; auto uses a GPU if there is one."""

    @property
    def annotated(self) -> bool:
        return self.from_ == "annotated"

    @property
    def role(self) -> Role:
        return "stop" if self.stop else "gate" if self.gate else "judge"

    def drafter_plan(self, run: Path) -> DrafterPlan:
        """Return the plan of a drafter. Raises InputError for flags that exclude each other."""
        from lenience.training.fit_drafter import DrafterPlan

        assert self.drafter is not None and self.drafter != "skip"
        ours = ("drafter", *OF_DRAFTERS, "out", "seed")
        self._refuse_others(*ours, what="another head than --drafter's")
        if self.heads is not None and self.drafter in ("eagle", "model"):
            raise InputError(
                f"--heads: drafter {self.drafter} has no heads; leave it out"
            )
        if self.heads is not None and not 1 <= self.heads <= MOST_HEADS:
            raise InputError(f"--heads {self.heads}: must be from 1 to {MOST_HEADS}")
        if self.epochs is not None and self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: must be 1 or more")
        for flag, given in (
            ("distill", self.distill),
            ("only-rejected", self.only_rejected),
            ("layers", self.layers),
        ):
            if given and self.drafter != "model":
                raise InputError(f"--{flag}: needs --drafter model")
        if self.tune_target and self.drafter != "blockwise":
            raise InputError("--tune-target: needs --drafter blockwise")
        if self.draft_vocab is not None:
            self._check_vocabulary()
        return DrafterPlan(
            self.drafter,
            self.out or run / self.drafter,
            heads=self.heads or 4,
            distill=self.distill or "forward-kl",
            only_rejected=self.only_rejected,
            layers=self.cut(),
            draft_vocab=self.draft_vocab,
            tune_target=self.tune_target,
            epochs=self.epochs,
            seed=self.seed,
        )

    def mixture_plan(self, run: Path) -> MixturePlan:
        """Return the plan of a mixture. Raises InputError for flags that exclude each other."""
        from lenience.training.mixture import MixturePlan

        ours = ("mixture", "out", "seed")
        self._refuse_others(*ours, what="another head than --mixture's")
        return MixturePlan(self.out or run / "mixture", seed=self.seed)

    def _check_vocabulary(self) -> None:
        """Raise InputError if the drafter cannot have a draft vocabulary."""
        if self.drafter == "blockwise":
            raise InputError(
                "--draft-vocab: blockwise heads share the target's LM head; take medusa"
            )
        if self.drafter == "model" and self.layers is None:
            raise InputError(
                "--draft-vocab: is for a draft that is cut out of the target; give "
                "--layers too"
            )

    def cut(self) -> int | tuple[int, ...] | None:
        """Return the layers to cut a draft out of, or their number; None without --layers. Raises
        InputError for other text."""
        if self.layers is None:
            return None
        try:
            numbers = tuple(int(layer) for layer in self.layers.split(",") if layer)
        except ValueError:
            numbers = ()
        if not numbers:
            raise InputError(
                f"--layers {self.layers}: name layers from 0 on, separated by commas, "
                "or their "
                "number"
            )
        return numbers if "," in self.layers else numbers[0]

    def check_skip(self) -> None:
        """Raise InputError for flags that `--drafter skip` excludes."""
        self._refuse_others(
            "drafter", what="what is fitted, and --drafter skip only looks"
        )

    def drawn(self) -> TreeSampling | None:
        """Return the sampling of a measured tree's tokens; None if the most probable are taken.
        Raises InputError for flags that `--tree` excludes."""
        from lenience.training.acceptance import TreeSampling

        ours = ("tree", "with_", "draw", "temperature")
        self._refuse_others(*ours, what="a head, and --tree fits none")
        if self.draw is None:
            if self.temperature is not None:
                raise InputError("--temperature: needs --draw")
            return None
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 < temperature < math.inf:
            raise InputError(
                f"--temperature {temperature:g}: must be above 0 with --draw"
            )
        return TreeSampling(self.draw, temperature)

    def _refuse_others(self, *names: str, what: str) -> None:
        """Raise InputError if options other than `names` and those of the models are given."""
        usual = FitFlags()
        for item in fields(self):
            if item.name in (*names, "target", "draft", "device"):
                continue
            if getattr(self, item.name) != getattr(usual, item.name):
                flag = item.name.rstrip("_").replace("_", "-")
                raise InputError(f"--{flag}: is of {what}; leave it out")

    def plan(self, run: Path) -> HeadPlan:
        """Return the plan of a head. Raises InputError for flags that exclude each other."""
        from lenience.heads.fitting import FitConfig
        from lenience.training.fit import HeadPlan

        self._check()
        role = self.role
        default = "adam" if self.gate else "logistic"
        kind: Any = self.head or ("adamw" if self.annotated else default)
        folder = self.out or (run.with_suffix("") if self.annotated else run) / role
        if self.from_ == "run" and run.is_file():
            fix = "name a run folder or, for annotated answers, give --from annotated"
            raise InputError(f"{run}: is a file; {fix}")
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
            self._inputs(_has_draft(run) or self.draft is not None),
            folder,
            config,
            tau=self.tau or 1.0,
            also=self.also,
            soft=self.soft,
            of=None if self.of is None else read_rule(self.of),
        )

    def _check(self) -> None:
        for name in OF_DRAFTERS:
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: needs --drafter")
        for flag, given in (
            ("with", self.with_),
            ("draw", self.draw),
            ("temperature", self.temperature),
        ):
            if given is not None:
                raise InputError(f"--{flag}: needs --tree")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise InputError(f"--recall {self.recall}: must be in (0, 1]")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be from 0 to 2**32 - 1")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise InputError(f"--weight {self.weight:g}: must be above 0")
        if self.stop and self.gate:
            raise InputError(
                "--gate: cannot be combined with --stop; train one after the other"
            )
        if self.curve and self.annotated:
            raise InputError("--curve: needs mined samples; leave it out")
        if self.soft and (self.annotated or self.role != "judge"):
            raise InputError(
                "--soft: needs a judge trained on mined mismatches; leave it out"
            )
        if self.also and self.annotated:
            raise InputError("--also: needs mined runs; leave it out")
        if self.of is not None:
            self._check_of(self.of)
        if self.tau is not None and not (self.gate and self.tau > 0):
            raise InputError(f"--tau {self.tau:g}: needs --gate, and a number above 0")

    def _check_of(self, rule: str) -> None:
        from lenience.certification.certificate import refuse_certified
        from lenience.rules.baselines import BASELINES

        if not self.stop:
            raise InputError(
                "--of: names the rule that a stop learns from; give --stop too"
            )
        if rule in BASELINES:
            raise InputError(f"--of {rule}: rejects no tokens; name a rule that drafts")
        refuse_certified([rule])

    def _inputs(self, has_draft: bool) -> Inputs:
        """Return the inputs of the head, with defaults for those that are not named."""
        from lenience.heads.head import Inputs

        role = self.role
        models = self.models
        tokens = self.tokens
        if self.ahead is not None and (self.annotated or role != "judge"):
            raise InputError(
                "--ahead: needs a judge trained on mined mismatches; leave it out"
            )
        if self.annotated:
            if (
                role != "judge"
                or models not in (None, "target")
                or tokens not in (None, "draft")
            ):
                raise InputError(
                    "--from annotated: fits a judge to the target's states after each "
                    "token; "
                    "leave the others out"
                )
            return Inputs(("target",), ("draft",), self._layers("-1"))
        if role != "judge" and models:
            raise InputError(f"--{role}: reads the draft's states; leave --models out")
        if role != "judge" and tokens not in (None, "draft", "previous"):
            raise InputError(
                f"--tokens {tokens}: a {role} reads the state after draft or after "
                "previous"
            )
        as_published = self.head in (None, "logistic") and self.ahead is None
        of_judge = "draft" if as_published else "draft,previous"
        defaults = {"judge": of_judge, "stop": "previous", "gate": "previous"}
        of_pair = "target,draft" if has_draft else "target"
        whose = models or (of_pair if role == "judge" else "draft")
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


def _has_draft(run: Path) -> bool:
    """Return True if a run was mined with a draft model, or nothing was mined."""
    from lenience.runs.record import read_run

    if not (run / "run.json").is_file():
        return True
    return "draft" in read_run(run).models
