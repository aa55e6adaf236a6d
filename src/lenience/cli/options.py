"""The commands' options, and what is asked with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from lenience.core.errors import InputError
from lenience.decoding.options import Decoding, default_options, option_types, told_options

if TYPE_CHECKING:
    from lenience.certification.question import CertifyConfig
    from lenience.certification.tune import TuneConfig
    from lenience.cli.prompts import Asked
    from lenience.evaluation.compare import CompareConfig
    from lenience.heads.head import Inputs, Role
    from lenience.mining.acceptance import Drawn
    from lenience.mining.drafters import DrafterPlan
    from lenience.mining.fit import HeadPlan
    from lenience.mining.search import MineConfig

OWN_DEFAULTS = ("window", "max_new_tokens", "seed")
"""Options whose help says what they are where they are left out."""
MOST_HEADS = 32
"""Of a drafter."""
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative="",
        show_default=False,
        help="Print one JSON object as the last line.",
    ),
]


def decoding_flags(name: str, *leave_out: str, **other_helps: str) -> Any:
    """A class of flags, one for each option of decoding but those that are left out; their help is
    the option's docstring, where there is no other."""
    helps = {**told_options(Decoding), **other_helps}
    options: list[tuple[str, Any, Any]] = []
    for option, kind in option_types().items():
        if option in leave_out:
            continue
        several = kind == tuple[str, ...]
        flag = "--" + (option.removesuffix("s") if several else option).replace("_", "-")
        optional: Any = kind | None
        told = {"help": helps[option], "show_default": _usual(option)}
        annotated = Annotated[optional, Parameter(name=flag, negative="", **told)]
        options.append((option, annotated, None))
    flags = make_dataclass(name, options)
    flags.__module__ = __name__  # or cyclopts takes it for one of Python's own types
    return Parameter(name="*", group=Group("Decoding", sort_key=1))(flags)


def _usual(option: str) -> Any:
    """What shows the default of an option of decoding, whose flag has none itself so that it is
    known whether it was given."""
    usual = default_options()[option]
    return bool(usual) and option not in OWN_DEFAULTS and (lambda _: usual)


if TYPE_CHECKING:

    class GenerateFlags: ...

    class CertifyDecoding: ...

    class CompareDecoding: ...

else:
    GenerateFlags = decoding_flags("GenerateFlags")
    CertifyDecoding = decoding_flags(
        "CertifyDecoding",
        "rule",
        "stop_strings",
        window="The draft window, 8 by default, which the certificate binds; auto picks the "
        "fastest, on prompts of its own.",
        seed="Of the sampling, and of which prompts are drawn.",
    )
    CompareDecoding = decoding_flags(
        "CompareDecoding", "rule", "window", "stop_strings", seed="Of the sampling, 0 by default."
    )


def given(flags: object | None) -> dict[str, Any]:
    """The options of decoding that were given."""
    values = {} if flags is None else vars(flags)
    return {name: value for name, value in values.items() if value is not None}


@Parameter(name="*")
@dataclass
class PromptFlags:
    messages: Path | None = None
    """A JSON file of chat messages that are the prompt."""
    prompts: Path | None = None
    """A file of many prompts: JSON rows with prompt or messages and perhaps id, or lines of text.
    With --json each answer is an object on a line of its own."""
    batch_size: int = 16
    """How many of these are answered together."""
    show: Flag = False
    """Colour every token by where it came from."""
    profile: Flag = False
    """Say where the time goes; the prompt is answered once before, which is not counted."""

    def many(self, prompt: str | None) -> list[Asked]:
        """The prompts of a file, none where there is no file. Raises InputError for what does not
        go together."""
        from lenience.cli.prompts import prompts_in

        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be 1 or more")
        if self.prompts is None:
            return []
        if prompt is not None or self.messages is not None:
            raise InputError("--prompts: are all prompts; leave the other one out")
        if self.show or self.profile:
            raise InputError("--prompts: is for many; leave --show and --profile out")
        return prompts_in(self.prompts)


BESIDE = ("plan", "workers", "ray")
"""What of mining's flags says how it is done, and not what."""


@Parameter(name="*")
@dataclass
class MineFlags:
    limit: int | None = None
    """How many samples; all of the training split if left out."""
    max_new_tokens: int | None = None
    """The length limit of an answer; by default the task's own."""
    batch_size: int = 16
    """How many samples are decoded together."""
    first: Flag = False
    """Take the split's first samples, instead of random ones."""
    seed: int = 0
    """Of the choice of samples."""
    temperature: float = 0.0
    """Mine answers that are drawn at this temperature, as they will be decoded; a judge of them is
    bound to it."""
    top_k: int | None = None
    """Draw from so many most probable tokens; by default as the model's own configuration says."""
    top_p: float | None = None
    """Draw from the most probable tokens that have this probability together; likewise."""
    draw_seed: int = 0
    """Of these draws."""
    resamples: int = 0
    """Continue each swap that changed the answer so many times more, by chance: fit --soft learns
    from how many of these change it too."""
    policy: str | None = None
    """Mine the answers of a decoder, such as 'judge:RUN/judge@0.99; window=16', and not the
    target's: which of the tokens that it kept by lenience changed the answer. Into a run folder of
    its own, which fit --also takes."""

    workers: int | None = None
    """Search by so many processes, each with its own models and, where there are several, its own
    GPU."""
    ray: str | None = None
    """Search by actors on the Ray cluster at this address, or "local" for this machine alone: as
    many as it has room for, or --workers; nodes may come and go."""
    plan: int | None = None
    """Mine a pilot alone, of 8 samples or --limit, and say what so many important mismatches will
    take; mining without it then goes on from there."""

    def config(self) -> MineConfig:
        """What is mined. Raises InputError for what is wrong with it, before models are loaded."""
        from lenience.mining.forecast import PILOT
        from lenience.mining.on_policy import check_policy
        from lenience.mining.search import MineConfig

        options = {name: value for name, value in vars(self).items() if name not in BESIDE}
        if self.plan is not None:
            if self.plan < 1:
                raise InputError(f"--plan {self.plan}: must be 1 or more important mismatches")
            options["limit"] = self.limit or PILOT
        if self.resamples < 0:
            raise InputError(f"--resamples {self.resamples}: must be 0 or more")
        if self.policy is not None and self.resamples:
            raise InputError("--resamples: is of swaps that were mined without --policy")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"--workers {self.workers}: must be 1 or more")
        if self.policy is not None and (self.workers, self.ray) != (None, None):
            raise InputError("--policy: is mined in this process; leave out --workers and --ray")
        policy = None if self.policy is None else Decoding.parse(self.policy)
        if policy is not None:
            check_policy(policy)
        return MineConfig(**{**options, "policy": policy})


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
    Decoding)."""
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
        """The drafter's heads that are asked for. Raises InputError for what does not go
        together."""
        from lenience.mining.drafters import DrafterPlan

        assert self.drafter is not None and self.drafter != "skip"
        ours = ("heads", "distill", "only_rejected", "tune_target", "epochs", "out", "seed")
        self._refuse_others("drafter", *ours, what="another head than --drafter's")
        if self.heads is not None and self.drafter in ("eagle", "model"):
            raise InputError(f"--heads: {self.drafter} has none; leave it out")
        if self.heads is not None and not 1 <= self.heads <= MOST_HEADS:
            raise InputError(f"--heads {self.heads}: must be from 1 to {MOST_HEADS}")
        if self.epochs is not None and self.epochs < 1:
            raise InputError(f"--epochs {self.epochs}: must be 1 or more")
        for flag, given in (("distill", self.distill), ("only-rejected", self.only_rejected)):
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
        self._refuse_others("drafter", what="what is fitted, and --drafter skip only looks")

    def drawn(self) -> Drawn | None:
        """How the tokens of a measured tree are drawn; None where they are chosen. Raises
        InputError for what does not go together with `tree`."""
        from lenience.mining.acceptance import Drawn

        ours = ("tree", "with_", "draw", "temperature")
        self._refuse_others(*ours, what="a head, and --tree fits none")
        if self.draw is None:
            if self.temperature is not None:
                raise InputError("--temperature: is of trees that are drawn; give --draw too")
            return None
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 < temperature < math.inf:
            raise InputError(f"--temperature {temperature:g}: must be above 0 where --draw draws")
        return Drawn(self.draw, temperature)

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
        """The head that is asked for. Raises InputError for what does not go together."""
        from lenience.heads.fitting import FitConfig
        from lenience.mining.fit import HeadPlan

        self._check()
        role, default = self.role, "adam" if self.gate else "logistic"
        kind: Any = self.head or ("adamw" if self.annotated else default)
        folder = self.out or (run.with_suffix("") if self.annotated else run) / role
        if self.from_ == "run" and run.is_file():
            mend = "name a run folder or, for annotated answers, give --from annotated"
            raise InputError(f"{run}: is a file; {mend}")
        if file := next((one for one in (folder, *folder.parents) if one.is_file()), None):
            raise InputError(f"--out {folder}: {file} is a file; name another folder")
        recall = self.recall
        if recall is None and not self.annotated:
            recall = FitConfig.recall
        config = FitConfig(kind, role, recall, weight=self.weight, seed=self.seed)
        return HeadPlan(
            self._inputs(),
            folder,
            config,
            tau=self.tau or 1.0,
            also=self.also,
            soft=self.soft,
            of=self.of,
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
            raise InputError("--gate: is another head than --stop's; fit them one after the other")
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
        from lenience.decoding.certified import refuse_certified
        from lenience.rules.registry import BASELINES, parse_rule

        if not self.stop:
            raise InputError("--of: says what a stop learns from; give --stop too")
        if rule in BASELINES:
            raise InputError(f"--of {rule}: rejects nothing; name a rule that drafts")
        refuse_certified([rule])
        parse_rule(rule)

    def _inputs(self) -> Inputs:
        """What the head reads, by what was said and else by default."""
        from lenience.heads.head import Inputs

        role, models, tokens = self.role, self.models, self.tokens
        if self.ahead is not None and (self.annotated or role != "judge"):
            raise InputError("--ahead: is for judges of mined mismatches; leave it out")
        if self.annotated:
            if role != "judge" or models not in (None, "target") or tokens not in (None, "draft"):
                raise InputError(
                    "--from annotated: fits a judge to the target's states after each token; "
                    "leave the others out"
                )
            return Inputs(("target",), ("draft",), self._layers("-1"))
        if role != "judge" and models:
            raise InputError(f"--{role}: is fitted to the draft's own states; leave --models out")
        if role != "judge" and tokens not in (None, "draft", "previous"):
            raise InputError(
                f"--tokens {tokens}: a {role} reads the state after draft or after previous"
            )
        as_published = self.head in (None, "logistic") and self.ahead is None
        of_judge = "draft" if as_published else "draft,previous"
        defaults = {"judge": of_judge, "stop": "previous", "gate": "previous"}
        whose = models or ("target,draft" if role == "judge" else "draft")
        read_after = tokens or defaults[role]
        models_read, tokens_read = tuple(whose.split(",")), tuple(read_after.split(","))
        return Inputs(models_read, tokens_read, self._layers("norm"), self.ahead)

    def _layers(self, usual: str) -> tuple[int | None, ...]:
        named = (self.layer or usual).split(",")
        try:
            return tuple(None if one == "norm" else int(one) for one in named)
        except ValueError:
            raise InputError(f"--layer {self.layer}: name numbers, or norm, with commas") from None


@Parameter(name="*")
@dataclass
class QuestionFlags:
    """What is asked of a certificate, also after tuning."""

    max_drop: float = 0.01
    """The largest loss allowed, as a fraction."""
    confidence: float = 0.95
    """How sure to be that it is not more."""
    rule: tuple[str, ...] = ()
    """The rule, by default the run's judge; one without its threshold, or a name such as topk or
    fuzzy:js, stands for a ladder of settings from strict to lenient. Of several rules the fastest
    that passes is certified."""
    threshold: tuple[float, ...] = ()
    """The thresholds to try."""
    loss: Literal["paired", "net", "disagreement", "task"] = "paired"
    """paired (the target alone was right and the lenient answer is wrong), net (losses less gains),
    disagreement with the target's answer (needs no references), or task (what the task's own loss
    returns, in [0, 1])."""
    procedure: Literal["auto", "binomial", "hoeffding-bentkus", "betting"] = "auto"
    """How each setting is tested: binomial for paired and disagreement, betting for the others, or
    hoeffding-bentkus."""
    limit: int | None = None
    """How many prompts at most, by default three fifths of --horizon; asked again with more, the
    question goes on."""
    horizon: int | None = None
    """Over how many prompts the error is spent, by default 50 / --max-drop, four times as many for
    --loss net and task: fewer settle it sooner where there are no more."""
    ask_labels: Path | None = None
    """A JSONL file for prompts without a reference: those on which the answers differ are written
    to it, to be filled in before asking again."""
    ids: Path | None = None
    """A file with the ids of the prompts to use, one a line."""
    split: str = "train"
    """The task's split that prompts are drawn from."""
    allow_weak_target: Flag = False
    """Ask although the target is right on less than ten times --max-drop of the prompts, so that
    little can be lost by any decoder."""

    def question(self, run: Path, options: Mapping[str, Any]) -> CertifyConfig:
        """The question. Raises InputError for what is wrong with it, before models are loaded."""
        from lenience.certification.question import CertifyConfig

        config = CertifyConfig(
            rules=self.rule or (judge_of(run),),
            max_drop=self.max_drop,
            confidence=self.confidence,
            loss=self.loss,
            procedure=self.procedure,
            thresholds=self.threshold,
            options=options,
            limit=self.limit,
            horizon=self.horizon,
            labels=self.ask_labels,
            ids=read_ids(self.ids),
            split=self.split,
            allow_weak_target=self.allow_weak_target,
        )
        config.chains()
        return config


@Parameter(name="*")
@dataclass
class CertifyFlags(QuestionFlags):
    plan: Flag = False
    """Only say what a certificate would take, from a pilot of fresh prompts."""
    pilot: int = 40
    """How many prompts the pilot takes; they are used up."""

    def config(self, run: Path, options: Mapping[str, Any]) -> CertifyConfig:
        """The question. Raises InputError for what is wrong with it, before models are loaded."""
        if self.pilot < 1:
            raise InputError(f"--pilot {self.pilot}: must be 1 or more")
        return self.question(run, options)


@Parameter(name="*")
@dataclass
class TuneFlags(QuestionFlags):
    window: tuple[int, ...] = ()
    """The draft windows that are tried, 2 4 8 16 32 by default."""
    stop: tuple[str, ...] = ()
    """The stop conditions that are tried beside a fixed window; by default, if the run has a stop
    head, that at three thresholds."""
    prompts: int = 20
    """How many prompts settings race on; they are used up."""
    max_new_tokens: int | None = None
    """The length limit of an answer; by default the task's own."""

    def config(self, run: Path) -> TuneConfig:
        """What is tuned. Raises InputError for what is wrong with it, before models are loaded."""
        from lenience.certification.tune import WINDOWS, TuneConfig
        from lenience.decoding.auto_window import STOP_THRESHOLDS
        from lenience.drafting.stops import Likely, parse_stop

        stops = self.stop
        if not stops and (run / "stop" / "stop.json").is_file():
            stops = tuple(str(Likely(str(run / "stop"), one)) for one in STOP_THRESHOLDS)
        for stop in stops:
            parse_stop(stop)
        options = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return TuneConfig(
            self.question(run, options),
            windows=self.window or WINDOWS,
            stops=tuple(dict.fromkeys(("fixed", *stops))),
            prompts=self.prompts,
        )


@Parameter(name="*")
@dataclass
class AuditFlags:
    share: float = 0.05
    """The share of prompts that is audited."""
    confidence: float = 0.95
    """A drift is told wrongly, ever, with a chance of at most one less this."""
    batch_size: int = 16
    """How many prompts are decoded together."""
    seed: int = 0
    """Of the choice of prompts."""


@Parameter(name="*")
@dataclass
class CompareFlags:
    rule: tuple[str, ...] = ()
    """A rule; give one for each row. The target alone and, where there is one, the draft alone are
    always compared. all stands for a grid of every rule and, for a judge that is named beside it
    without a threshold, for several."""
    setting: tuple[str, ...] = ()
    """A whole decoder, such as 'judge:run/judge@0.99; window=16; stop=confidence:0.4': a rule and
    any options of decoding; give one for each row."""
    window: tuple[int, ...] = ()
    """The draft windows to choose from, 2 4 8 16 32 by default; each decoder that names none runs
    at its fastest and at the widest."""
    limit: int | None = None
    """How many test samples; all if left out."""
    tuning: int = 20
    """How many other samples the windows are chosen on."""
    timed: int = 50
    """How many of the test samples are decoded one by one as well, for the seconds."""
    repeats: int = 3
    """How often each of those is decoded; medians are taken."""
    batch_size: int = 32
    """How many samples are decoded together where quality is measured."""
    out: Path | None = None
    """A folder for frontier.json and report.html; with it, a comparison that was stopped goes
    on, and further rules join the one that is there: its answers are kept, and all are timed anew,
    in turn."""

    def config(self, options: Mapping[str, Any]) -> CompareConfig:
        """What is compared. Raises InputError for what is wrong with it, before models are
        loaded."""
        from lenience.evaluation.compare import DEFAULT_WINDOWS, CompareConfig

        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit {self.limit}: must be 1 or more")
        if any(one < 1 for one in self.window):
            raise InputError("--window: must be 1 or more")
        config = CompareConfig(
            rules=self.rule,
            settings=self.setting,
            windows=self.window or DEFAULT_WINDOWS,
            options=options,
            limit=self.limit,
            tuning=self.tuning,
            timed=self.timed,
            repeats=self.repeats,
            batch_size=self.batch_size,
        )
        config.check()
        return config


def judge_of(run: Path) -> str:
    """A run's own judge, as a rule."""
    if not run.exists():
        raise InputError(f"{run}: there is no such folder; lenience mine makes one")
    if not (run / "judge" / "judge.json").is_file():
        raise InputError(f"{run}: has no judge; fit one (lenience fit {run}) or name a --rule")
    from lenience.rules.judge import Judge

    return str(Judge(str(run / "judge")))


def read_ids(path: Path | None) -> tuple[str, ...]:
    """The ids in a file, each once."""
    if path is None:
        return ()
    try:
        return tuple(dict.fromkeys(path.read_text(encoding="utf-8").split()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--ids {path}: cannot be read ({error})") from None
