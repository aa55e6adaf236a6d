"""The options of the commands, and the settings made from them."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from lenience.cli.servers import Claims, Servers
from lenience.core.errors import InputError, reason
from lenience.decoding.options import (
    Options,
    default_options,
    option_descriptions,
    option_types,
)

if TYPE_CHECKING:
    from lenience.certification.question import CertifyConfig
    from lenience.certification.tune import TuneConfig
    from lenience.cli.prompts import GivenPrompt
    from lenience.decoding.decoder import Decoder
    from lenience.evaluation.compare import CompareConfig
    from lenience.mining.search import MineConfig

OWN_DEFAULTS = ("window", "max_new_tokens", "seed")
"""Options whose help text states the default."""
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
    """Return a class of flags, one for each decoding option except those in `leave_out`. The help
    of a flag is the option's docstring, unless `other_helps` has another."""
    helps = {**option_descriptions(Options), **other_helps}
    options: list[tuple[str, Any, Any]] = []
    for option, kind in option_types().items():
        if option in leave_out:
            continue
        several = kind == tuple[str, ...]
        flag = "--" + (option.removesuffix("s") if several else option).replace(
            "_", "-"
        )
        optional: Any = kind | None
        parameter = {"help": helps[option], "show_default": _usual(option)}
        annotated = Annotated[optional, Parameter(name=flag, negative="", **parameter)]
        options.append((option, annotated, None))
    flags = make_dataclass(name, options)
    flags.__module__ = __name__  # or cyclopts takes it for one of Python's own types
    return Parameter(name="*", group=Group("Decoding", sort_key=1))(flags)


def _usual(option: str) -> Any:
    """Return a function that shows the default of a decoding option; False to show none. The flag's
    own default is None, which differs from every given value."""
    usual = default_options()[option]
    return bool(usual) and option not in OWN_DEFAULTS and (lambda _: usual)


if TYPE_CHECKING:

    class GenerateFlags: ...

    class ServeDecoding: ...

    class CertifyDecoding: ...

    class CompareDecoding: ...

else:
    GenerateFlags = decoding_flags("GenerateFlags")
    ServeDecoding = decoding_flags(
        "ServeDecoding",
        "seed",
        "stop_strings",
        "max_new_tokens",
        temperature="Sampling temperature of requests that name none; 0 decodes greedily.",
    )
    CertifyDecoding = decoding_flags(
        "CertifyDecoding",
        "rule",
        "stop_strings",
        window="Maximum number of drafted tokens per cycle, which the certificate binds. Default: "
        "8; auto picks the fastest window, on separate prompts.",
        seed="Random seed for sampling and for drawing prompts.",
    )
    CompareDecoding = decoding_flags(
        "CompareDecoding",
        "rule",
        "window",
        "stop_strings",
        seed="Random seed for sampling. Default: 0.",
    )


def given(flags: object | None) -> dict[str, Any]:
    """Return the decoding options that were given."""
    values = {} if flags is None else vars(flags)
    return {name: value for name, value in values.items() if value is not None}


@Parameter(name="*")
@dataclass
class PromptFlags:
    messages: Path | None = None
    """JSON file of chat messages to use as the prompt."""
    prompts: Path | None = None
    """File of prompts: JSON rows with prompt or messages and an optional id, or lines of text. With
    --json each answer is one JSON object per line."""
    batch_size: int = 16
    """Number of prompts per batch."""
    show: Flag = False
    """Colour each token by its origin."""
    profile: Flag = False
    """Print the wall-clock time per component. The prompt is first answered once as a warm-up."""
    servers: Servers = field(default_factory=Servers)

    def many(self, prompt: str | None) -> list[GivenPrompt]:
        """Return the prompts in the file of --prompts; none without a file. Raises InputError for
        flags that exclude each other."""
        from lenience.cli.prompts import prompts_in

        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be 1 or more")
        if self.prompts is None:
            return []
        if prompt is not None or self.messages is not None:
            raise InputError(
                "--prompts: replaces PROMPT and --messages; give one of them"
            )
        if self.show or self.profile:
            raise InputError("--prompts: cannot be combined with --show or --profile")
        return prompts_in(self.prompts)


def located(path: str) -> str:
    """Return an existing local path as an absolute path, so that other processes find it."""
    return str(Path(path).resolve()) if Path(path).exists() else path


MINUTES = 30.0
"""Default of tune --minutes."""
BESIDE = ("plan", "workers", "ray")
"""Flags that set how mining runs, not what is mined."""


@Parameter(name="*")
@dataclass
class MineFlags:
    limit: int | None = None
    """Number of samples. Default: the whole training split."""
    max_new_tokens: int | None = None
    """Maximum number of new tokens in an answer. Default: the task's own limit."""
    batch_size: int = 16
    """Number of samples per batch."""
    first: Flag = False
    """Take the first samples of the split. Default: random ones."""
    seed: int = 0
    """Random seed for choosing samples."""
    temperature: float = 0.0
    """Sampling temperature of the mined answers. Use the temperature of later decoding: a judge is
    bound to it."""
    top_k: int | None = None
    """Number of most probable tokens to sample from. Default: the model's generation_config."""
    top_p: float | None = None
    """Share of the probability to sample from, most probable tokens first. Default: the model's
    generation_config."""
    draw_seed: int = 0
    """Random seed for sampling the mined answers."""
    resamples: int = 0
    """Number of sampled continuations of each swap that changed the answer. fit --soft learns from
    the share of continuations that change it."""
    drafter: str = "model"
    """Drafter whose tokens are swapped in: model, ngram, medusa:PATH, eagle:PATH, skip:LAYERS, …
    A judge learns from this drafter's tokens."""
    answers_only: Flag = False
    """Record the target's answers without searching them for mismatches, to train drafters
    (fit --drafter) or measure trees (fit --tree). Needs no draft model."""
    labels: Literal["answers", "likelihood"] = "answers"
    """Method of labelling a mismatch: by the final answer after the swap, or by the likelihood of
    the target's own response after it, for tasks without answers to compare (SelfJudge)."""
    least: float | None = None
    """Score in nats under which a mismatch is important, for --labels likelihood. Default:
    -11.4."""
    policy: str | None = None
    """Decoder whose answers are mined instead of the target's, such as 'judge:RUN/judge@0.99;
    window=16'. Labels mark its leniently accepted tokens that changed the answer. Use a new run
    folder; fit --also learns from it."""

    workers: int | None = None
    """Number of worker processes, each with its own models and, if there are several, its own
    GPU."""
    ray: str | None = None
    """Address of a Ray cluster whose actors do the search, or "local" for this machine. The number
    of actors is --workers, or as many as fit. Nodes may join and leave."""
    plan: int | None = None
    """Number of important mismatches to plan for: mine a pilot of 8 samples (or --limit) and print
    the estimated cost. A later run without --plan continues from the pilot."""

    def config(self) -> MineConfig:
        """Return the settings of the mining run. Raises InputError for wrong flags, before models
        are loaded."""
        from lenience.mining.forecast import PILOT
        from lenience.mining.on_policy import check_policy
        from lenience.mining.search import MineConfig

        options = {}
        for name, value in vars(self).items():
            if name not in BESIDE:
                options[name] = value
        if self.plan is not None:
            if self.plan < 1:
                raise InputError(
                    f"--plan {self.plan}: must be 1 or more important mismatches"
                )
            options["limit"] = self.limit or PILOT
        if self.resamples < 0:
            raise InputError(f"--resamples {self.resamples}: must be 0 or more")
        if self.policy is not None and self.resamples:
            raise InputError("--resamples: cannot be combined with --policy")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"--workers {self.workers}: must be 1 or more")
        if (self.workers, self.ray) != (None, None):
            alone = "--policy" if self.policy is not None else "--labels likelihood"
            if self.policy is not None or self.labels == "likelihood":
                raise InputError(f"{alone}: cannot be combined with --workers or --ray")
        if self.answers_only and self.plan is not None:
            raise InputError(
                "--plan: counts important mismatches; leave out --answers-only"
            )
        from lenience.decoding.decoder import Decoder

        policy = None if self.policy is None else Decoder.parse(self.policy)
        if policy is not None:
            check_policy(policy)
        drafter = Decoder.of(drafter=self.drafter).drafter.relocated(located)
        return MineConfig(**{**options, "policy": policy, "drafter": drafter})


@Parameter(name="*")
@dataclass
class QuestionFlags:
    """Flags of a question to certify, also after tuning."""

    max_drop: float = 0.01
    """Largest allowed loss, as a fraction."""
    confidence: float = 0.95
    """Confidence of the bound on the loss."""
    rule: tuple[str, ...] = ()
    """Rule to certify. Default: the run's judge. A rule without a threshold, or a name such as topk
    or fuzzy:js, stands for a ladder of settings from strict to lenient. If several rules pass, the
    rule with the most tokens per pass is certified."""
    threshold: tuple[float, ...] = ()
    """Thresholds to test."""
    loss: Literal["paired", "net", "disagreement", "task"] = "paired"
    """Loss to bound: paired (the target alone was right and the lenient answer is wrong), net
    (losses minus gains), disagreement (with the target's answer; needs no references) or task (the
    task's own loss, in [0, 1])."""
    procedure: Literal["auto", "binomial", "hoeffding-bentkus", "betting"] = "auto"
    """Statistical test of each setting: binomial (paired, disagreement), betting (the other losses)
    or hoeffding-bentkus. auto chooses by the loss."""
    limit: int | None = None
    """Maximum number of prompts. Default: three fifths of --horizon. Rerun with a larger
    number to continue."""
    horizon: int | None = None
    """Number of prompts over which the error budget is spent. Default: 50 / --max-drop, and four
    times as many for --loss net, --loss task or several --draws. A smaller horizon decides sooner
    if there are few prompts."""
    draws: int = 1
    """Number of sampled answers per prompt, with --temperature; a prompt's loss is the mean over
    its draws."""
    ask_labels: Path | None = None
    """JSONL file for prompts without a reference. Prompts on which the answers differ are written
    to it; fill them in and run the command again."""
    ids: Path | None = None
    """File with the ids of the prompts to use, one per line."""
    split: str = "train"
    """Split of the task that prompts are drawn from."""
    allow_weak_target: Flag = False
    """Certify even if the target's accuracy is below ten times --max-drop. The bound then says
    little."""

    def __post_init__(self) -> None:
        self._chains: tuple[tuple[str, ...], ...] = ()
        self._windows: tuple[int, ...] = ()

    def ask_about(self, settings: tuple[str, ...], each: bool) -> None:
        """Test servers, given by their settings: in one chain or, with `each`, separately."""
        if self.rule or self.threshold:
            raise InputError("--rule, --threshold: cannot be combined with --candidate")
        self._chains = (
            tuple((setting,) for setting in settings) if each else (settings,)
        )

    def question(self, run: Path, options: Mapping[str, Any]) -> CertifyConfig:
        """Return the question. Raises InputError for wrong flags, before models are loaded."""
        from lenience.certification.question import CertifyConfig

        rules = self.rule
        if not rules and not self._chains:
            rules = (judge_of(run),)
        config = CertifyConfig(
            rules=rules,
            settings=self._chains,
            max_drop=self.max_drop,
            confidence=self.confidence,
            loss=self.loss,
            procedure=self.procedure,
            thresholds=self.threshold,
            options=options,
            limit=self.limit,
            horizon=self.horizon,
            windows=self._windows,
            draws=self.draws,
            command=" ".join(map(quote, ["lenience", *sys.argv[1:]])),
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
    """Print the estimated cost of a certificate, from a pilot of fresh prompts, and certify
    nothing."""
    pilot: int = 40
    """Number of prompts in the pilot; they cannot be used again."""
    windows: str | None = None
    """Windows among which the engine may choose for each answer, such as 2,4,8; a loss at any of
    them counts. Default: only --window."""
    each: Flag = False
    """Test every candidate server on its own, with a shared error budget. Default: in the order
    given, up to the first that does not pass."""
    fail_if_not_certified: Flag = False
    """End with exit status 1 if nothing is certified."""
    claim: Claims = ()
    """Fact about the servers that they do not report, such as 'vLLM 0.33, fly, eps 0.3'; it is
    printed on the certificate as stated by the user."""
    servers: Servers = field(default_factory=Servers)

    def config(self, run: Path, options: Mapping[str, Any]) -> CertifyConfig:
        """Return the question. Raises InputError for wrong flags, before models are loaded."""
        if self.pilot < 1:
            raise InputError(f"--pilot {self.pilot}: must be 1 or more")
        if self.servers.named:
            self.ask_about(self.servers.settings(), self.each)
        self._windows = _several_windows(self.windows)
        return self.question(run, options)


def _several_windows(given: str | None) -> tuple[int, ...]:
    """Return the windows of --windows. Raises InputError for other text."""
    if given is None:
        return ()
    try:
        return tuple(map(int, given.split(",")))
    except ValueError:
        raise InputError(
            f"--windows {given}: give numbers with commas between them, such as 2,4,8"
        ) from None


@Parameter(name="*")
@dataclass
class TuneFlags(QuestionFlags):
    window: tuple[int, ...] = ()
    """Windows to race. Default: 2 4 8 16 32."""
    stop: tuple[str, ...] = ()
    """Stop conditions to race in addition to fixed (none). Default: the run's stop head at three
    thresholds, if it has one."""
    drafter: tuple[str, ...] = ()
    """Drafters to race. Default: every drafter that needs no training, and those trained in the
    run."""
    prompts: int | None = None
    """Number of prompts for the races and for timing the settings that pass; they are used up.
    Default: 80, or 16 times --batch-size if that is more."""
    batch_size: int = 1
    """Number of prompts per batch while settings are timed."""
    minutes: float | None = None
    """Time limit of the first heat in minutes, with --engine vllm: no further engine starts. The
    final and the certificate come on top. Default: 30."""
    max_new_tokens: int | None = None
    """Maximum number of new tokens in an answer. Default: the task's own limit."""

    def config(self, run: Path, *, in_vllm: bool) -> TuneConfig:
        """Return the settings of tuning. Raises InputError for wrong flags, before models are
        loaded."""
        if in_vllm and self.stop:
            raise InputError("--stop: vLLM drafts whole windows; leave it out")
        if not in_vllm and self.minutes is not None:
            raise InputError("--minutes: limits the engines of vLLM; leave it out")
        minutes = MINUTES if self.minutes is None else self.minutes
        from lenience.certification.tune import WINDOWS, TuneConfig
        from lenience.decoding.auto_window import STOP_THRESHOLDS
        from lenience.decoding.decoder import Decoder
        from lenience.drafting.stops import Likely

        stops = self.stop
        if not stops and not in_vllm and (run / "stop" / "stop.json").is_file():
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
            batch_size=self.batch_size,
            minutes=minutes if in_vllm else math.inf,
        )


@Parameter(name="*")
@dataclass
class AuditFlags:
    share: float = 0.05
    """Share of prompts to audit."""
    confidence: float = 0.95
    """Probability of never raising a false alarm."""
    batch_size: int = 16
    """Number of prompts per batch."""
    seed: int = 0
    """Random seed for choosing prompts."""
    claim: Claims = ()
    """Fact about the servers that they do not report, such as 'vLLM 0.33, fly, eps 0.3'. It must
    match the claim on the certificate."""
    servers: Servers = field(default_factory=Servers)


@Parameter(name="*")
@dataclass
class CompareFlags:
    run: Path | None = None
    """Run folder whose models and task are used unless flags name others. The report shows some of
    its mined answers."""
    rule: tuple[str, ...] = ()
    """Rule to compare, one row each; may be repeated. The target alone and the draft alone are
    always included. all stands for every rule at a grid of settings; a judge named without a
    threshold together with all runs at several thresholds."""
    setting: tuple[str, ...] = ()
    """Whole decoder to compare, such as 'judge:run/judge@0.99; window=16; stop=confidence:0.4'; may
    be repeated."""
    window: tuple[int, ...] = ()
    """Windows to choose from. Default: 2 4 8 16 32. A decoder without a window runs at its fastest
    and at the widest."""
    limit: int | None = None
    """Number of test samples. Default: all."""
    tuning: int = 20
    """Number of other samples on which windows are chosen."""
    timed: int = 50
    """Number of test samples that are also decoded one by one, for the timings."""
    repeats: int = 3
    """Number of timed repeats; medians are reported."""
    batch_size: int = 32
    """Number of samples per batch while quality is measured."""
    out: Path | None = None
    """Folder for frontier.json and report.html. A comparison in it resumes, and further rules join
    it: earlier answers are kept, and all settings are timed again in turn."""
    servers: Servers = field(default_factory=Servers)

    def config(self, options: Mapping[str, Any]) -> CompareConfig:
        """Return the settings of the comparison. Raises InputError for wrong flags, before models
        are loaded."""
        from lenience.evaluation.compare import DEFAULT_WINDOWS, CompareConfig

        check_limit(self.limit)
        if any(window < 1 for window in self.window):
            raise InputError("--window: must be 1 or more")
        config = CompareConfig(
            rules=self.rule,
            settings=(*self.setting, *self.servers.settings()),
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
    """Return the rule of a run's own judge. Raises InputError if the run has none."""
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
    """Return the decoder of the flags, before models are loaded. Raises InputError for wrong
    flags."""
    from lenience.decoding.decoder import Decoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings are shown when it decodes
        return Decoder.of(options)


def drafter_needs_draft(spec: str) -> bool:
    """Return True if a drafter needs a draft model."""
    from lenience.decoding.decoder import Decoder

    return Decoder.of(drafter=spec).drafter.needs_draft


def needs_draft(decoder: Decoder) -> bool:
    """Return True if a decoder runs a draft model."""
    if decoder.alone:
        return decoder.alone == "draft"
    return decoder.window != 0 and decoder.drafter.needs_draft


def check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")
