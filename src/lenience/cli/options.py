"""The commands' options, and what is asked with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from lenience.core.errors import InputError, reason
from lenience.decoding.options import (
    Options,
    default_options,
    option_types,
    told_options,
)

if TYPE_CHECKING:
    from lenience.certification.question import CertifyConfig
    from lenience.certification.tune import TuneConfig
    from lenience.cli.prompts import GivenPrompt
    from lenience.decoding.decoder import Decoder
    from lenience.evaluation.compare import CompareConfig
    from lenience.mining.search import MineConfig

OWN_DEFAULTS = ("window", "max_new_tokens", "seed")
"""Options whose help says what they are where they are left out."""
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
    """Return a class of flags, one for each option of decoding but those that are left out; their
    help is the option's docstring, where there is no other."""
    helps = {**told_options(Options), **other_helps}
    options: list[tuple[str, Any, Any]] = []
    for option, kind in option_types().items():
        if option in leave_out:
            continue
        several = kind == tuple[str, ...]
        flag = "--" + (option.removesuffix("s") if several else option).replace(
            "_", "-"
        )
        optional: Any = kind | None
        told = {"help": helps[option], "show_default": _usual(option)}
        annotated = Annotated[optional, Parameter(name=flag, negative="", **told)]
        options.append((option, annotated, None))
    flags = make_dataclass(name, options)
    flags.__module__ = __name__  # or cyclopts takes it for one of Python's own types
    return Parameter(name="*", group=Group("Decoding", sort_key=1))(flags)


def _usual(option: str) -> Any:
    """Return what shows the default of an option of decoding, whose flag has none itself so that it
    is known whether it was given."""
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
        "CompareDecoding",
        "rule",
        "window",
        "stop_strings",
        seed="Of the sampling, 0 by default.",
    )


def given(flags: object | None) -> dict[str, Any]:
    """Return the options of decoding that were given."""
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

    def many(self, prompt: str | None) -> list[GivenPrompt]:
        """Return the prompts of a file, none where there is no file. Raises InputError for what
        does not go together."""
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
        """Return what is mined. Raises InputError for what is wrong with it, before models are
        loaded."""
        from lenience.mining.forecast import PILOT
        from lenience.mining.on_policy import check_policy
        from lenience.mining.search import MineConfig

        options = {
            name: value for name, value in vars(self).items() if name not in BESIDE
        }
        if self.plan is not None:
            if self.plan < 1:
                raise InputError(
                    f"--plan {self.plan}: must be 1 or more important mismatches"
                )
            options["limit"] = self.limit or PILOT
        if self.resamples < 0:
            raise InputError(f"--resamples {self.resamples}: must be 0 or more")
        if self.policy is not None and self.resamples:
            raise InputError(
                "--resamples: is of swaps that were mined without --policy"
            )
        if self.workers is not None and self.workers < 1:
            raise InputError(f"--workers {self.workers}: must be 1 or more")
        if self.policy is not None and (self.workers, self.ray) != (None, None):
            raise InputError(
                "--policy: is mined in this process; leave out --workers and --ray"
            )
        from lenience.decoding.decoder import Decoder

        policy = None if self.policy is None else Decoder.parse(self.policy)
        if policy is not None:
            check_policy(policy)
        return MineConfig(**{**options, "policy": policy})


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
        """Return the question. Raises InputError for what is wrong with it, before models are
        loaded."""
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
        """Return the question. Raises InputError for what is wrong with it, before models are
        loaded."""
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
    drafter: tuple[str, ...] = ()
    """Drafters to race. Default: every drafter that needs no training, and those trained in the
    run."""
    prompts: int = 80
    """How many prompts settings race on, and what passes is timed on; they are used up."""
    max_new_tokens: int | None = None
    """The length limit of an answer; by default the task's own."""

    def config(self, run: Path) -> TuneConfig:
        """Return what is tuned. Raises InputError for what is wrong with it, before models are
        loaded."""
        from lenience.certification.tune import WINDOWS, TuneConfig
        from lenience.decoding.auto_window import STOP_THRESHOLDS
        from lenience.decoding.decoder import Decoder
        from lenience.drafting.stops import Likely

        stops = self.stop
        if not stops and (run / "stop" / "stop.json").is_file():
            stops = tuple(
                str(Likely(str(run / "stop"), threshold))
                for threshold in STOP_THRESHOLDS
            )
        for stop in stops:
            Decoder.of(stop=stop)
        for drafter in self.drafter:
            Decoder.of(drafter=drafter)
        options = (
            {}
            if self.max_new_tokens is None
            else {"max_new_tokens": self.max_new_tokens}
        )
        return TuneConfig(
            self.question(run, options),
            windows=self.window or WINDOWS,
            stops=tuple(dict.fromkeys(("fixed", *stops))),
            drafters=tuple(dict.fromkeys(self.drafter)),
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
        """Return what is compared. Raises InputError for what is wrong with it, before models are
        loaded."""
        from lenience.evaluation.compare import DEFAULT_WINDOWS, CompareConfig

        check_limit(self.limit)
        if any(window < 1 for window in self.window):
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
    """Return a run's own judge, as a rule."""
    if not run.exists():
        raise InputError(f"{run}: there is no such folder; lenience mine makes one")
    if not (run / "judge" / "judge.json").is_file():
        raise InputError(
            f"{run}: has no judge; fit one (lenience fit {run}) or name a --rule"
        )
    from lenience.rules.judge import Judge

    return str(Judge(str(run / "judge")))


def read_ids(path: Path | None) -> tuple[str, ...]:
    """Return the ids in a file, each once."""
    if path is None:
        return ()
    try:
        return tuple(dict.fromkeys(path.read_text(encoding="utf-8").split()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--ids {path}: cannot be read ({reason(error)})") from None


def decoder_of(options: Mapping[str, Any]) -> Decoder:
    """Return the decoder of flags, before the models are loaded. Raises InputError for what is
    wrong with them."""
    from lenience.decoding.decoder import Decoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say is said when it decodes
        return Decoder.of(options)


def needs_draft(decoder: Decoder) -> bool:
    """Return whether a draft model is asked for anything."""
    if decoder.alone:
        return decoder.alone == "draft"
    return decoder.window != 0 and decoder.drafter.needs_draft


def check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")
