"""Models and tasks named on the command line or in a run folder."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter

from lenience.cli.console import loading, say
from lenience.cli.steps import compile_pair
from lenience.core.errors import InputError
from lenience.core.files import read_json

if TYPE_CHECKING:
    from lenience.cli.options import MineFlags
    from lenience.decoding.pair import Pair
    from lenience.mining.crew import Crew
    from lenience.tasks import Task
    from lenience.tasks.grader import Grader

SETTINGS = "lenience.toml"
"""Name of the file in a run folder that holds its models and its task."""
SEVERAL = ("template_option", "stop_string")
SWITCHES = ("chat", "unsafe_local", "skip_long")
"""Settings that are true or false, not texts."""
MANY = 10_000
"""Number of samples or tokens to assume if unknown; large enough that exporting models pays."""
USED = 0.5
"""Assumed share of the length limit that an answer uses."""
KEPT = (
    "target",
    "draft",
    "dtype",
    "quantization",
    "device",
    "chat",
    "system",
    "template_option",
)


@Parameter(name="*", group=Group("Models and engine", sort_key=2))
@dataclass
class Models:
    target: str | None = None
    """Hub name, folder or GGUF file of the target. Default: the built-in pair."""
    draft: str | None = None
    """Hub name, folder or GGUF file of the draft model."""
    dtype: str | None = None
    """Precision of the weights: float32, bfloat16, … Default: the checkpoint's own."""
    quantization: Literal["int8", "int4"] | None = None
    """Rounding of the target's weights while it is loaded (torchao)."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    chat: bool | None = None
    """Apply the target's chat template to prompts. Default: if the target has one."""
    system: str | None = None
    """System message for the chat template."""
    template_option: Annotated[
        tuple[str, ...], Parameter(negative="", show_default=False)
    ] = ()
    """Argument of the chat template, NAME=VALUE, such as enable_thinking=false; may be repeated."""
    compile: bool | None = None
    """Export the models for ONNX Runtime and keep the exports. Default: only if the job is long and
    the models are small."""
    engine: Literal["lenience", "vllm", "openai"] = "lenience"
    """Engine that runs the models: lenience's own loop, vLLM with the rules inside it
    (docs/vllm.md), or servers with OpenAI's API (--reference)."""
    engine_arg: Annotated[
        tuple[str, ...], Parameter(negative="", show_default=False)
    ] = ()
    """Argument of vLLM, NAME=VALUE, such as tensor_parallel_size=2; may be repeated."""

    def load(self, tokens: float = 0, needs_draft: bool = True) -> Pair:
        """Load the pair. `tokens`, the estimated number of new tokens to decode, decides whether
        exporting the models pays. Raises InputError if a draft is needed and none is named."""
        self.check_engine(has_servers=False)
        if self.target is not None and self.draft is None and needs_draft:
            raise InputError(
                "--draft: name a draft model, or a --drafter that needs none"
            )
        with loading():
            from lenience.decoding.loading import load_pair

            options = self.loading() | {"compile": False}
            if self.engine == "vllm":
                if self.quantization is not None:
                    raise InputError(
                        "--quantization: rounds the target of lenience's own loop; name the "
                        "quantised checkpoint, or --engine-arg quantization=…"
                    )
                if self.device == "auto":  # leave the GPU's memory to vLLM
                    options["device"] = "cpu"
                return self._in_vllm(load_pair(self.target, self.draft, **options))
            pair = load_pair(self.target, self.draft, **options)
        if self.engine_arg:
            raise InputError(f"--engine-arg {self.engine_arg[0]}: needs --engine vllm")
        compile_pair(pair, self.compile, tokens)
        return pair

    def check_engine(self, has_servers: bool) -> None:
        """Raise InputError for an engine that contradicts the servers."""
        if self.engine == "openai" and not has_servers:
            raise InputError(
                "--engine openai: name a server (--reference), for certify, compare, audit or "
                "generate"
            )
        if not has_servers:
            return
        if self.engine == "vllm":
            raise InputError("--engine vllm: cannot be combined with --reference")
        for option in fields(self):
            kept = option.name in ("engine", "system")
            if not kept and getattr(self, option.name) != option.default:
                flag = option.name.replace("_", "-")
                raise InputError(f"--{flag}: cannot be combined with --reference")

    def loading(self) -> dict[str, Any]:
        """Return the options of `load_pair`, except compile, as plain values."""
        options = {}
        for name in ("dtype", "quantization", "device", "chat", "system"):
            options[name] = getattr(self, name)
        given = dict(
            _argument("--template-option", text) for text in self.template_option
        )
        return options | {"template_options": given}

    def refuse_vllm(self, command: str) -> None:
        """Raise InputError for --engine vllm with a command that does not run in vLLM."""
        if self.engine == "vllm":
            raise InputError(
                f"--engine vllm: {command} runs in our own loop; generate, mine, "
                "compare, certify, tune and audit run in vLLM"
            )

    def _in_vllm(self, pair: Pair) -> Pair:
        try:
            from lenience.integrations.vllm.engine import VllmPair
        except ImportError as error:
            raise InputError(
                f"--engine vllm: {error}; docs/vllm.md shows how to install it"
            ) from None

        return VllmPair(
            pair, dict(_argument("--engine-arg", text) for text in self.engine_arg)
        )


def _argument(flag: str, text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE. The value is parsed as JSON if possible."""
    name, found, value = text.partition("=")
    if not (name and found):
        raise InputError(f"{flag} {text!r}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@Parameter(name="*", group=Group("Task", sort_key=1))
@dataclass
class TaskChoice:
    task: str | None = None
    """Task: wordmath (the default), a benchmark such as gsm8k:shots=8 with --data (docs/tasks.md),
    JSON files (rows.jsonl, or train.jsonl,test.jsonl.gz), or file.py:Name."""
    data: str | None = None
    """Data of a benchmark: a file, several files separated by commas, a folder, or a dataset of the
    Hub."""
    grader: str | None = None
    """LLM that compares answers on tasks without a reference: an endpoint with OpenAI's API (URL or
    URL,model=NAME), or a model's folder or Hub name."""
    unsafe_local: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Run model-written programs without a sandbox, as this user."""
    skip_long: Annotated[bool, Parameter(negative="", show_default=False)] = False
    """Leave out prompts that are longer than the models' context."""
    stop_string: Annotated[
        tuple[str, ...], Parameter(negative="", show_default=False)
    ] = ()
    r"""Text that ends answers, with \n for a new line; may be repeated."""
    answer: str | None = None
    """Method of extracting the answer from a response, for JSON rows: number-after:MARKER,
    last-number, boxed, choice, after:MARKER or regex:PATTERN."""
    same: str | None = None
    """Comparison of answers: number, text, choice or math. Default: the one that suits
    --answer."""
    prompt_field: str | None = None
    """Field of a row that holds the prompt. Default: prompt (text) or messages (chat)."""
    reference_field: str | None = None
    """Field of a row that holds the reference. Default: reference."""
    prompt_template: str | None = None
    r"""Template that builds the prompt from a row's fields, such as 'Q: {question}\nA:', with \n
    for a new line."""

    def loading(self) -> dict[str, Any]:
        """Return the arguments of `load_task` as plain values."""
        others = ("task", "skip_long", "stop_string")
        options = {}
        for name, value in vars(self).items():
            if name not in others:
                options[name] = value
        options["stop_strings"] = [
            text.replace("\\n", "\n") for text in self.stop_string
        ]
        if self.prompt_template is not None:
            options["prompt_template"] = self.prompt_template.replace("\\n", "\n")
        options["unsafe_local"] = self.unsafe_local or None
        return {"spec": self.task or "wordmath", **options}

    def load(self) -> Task:
        from lenience.tasks import JsonlTask, load_task
        from lenience.tasks.grader import is_address
        from lenience.tasks.rows import unread_hint

        options = self.loading()
        if self.grader == "":
            raise InputError("--grader: is empty; name a server's address, or a model")
        if self.grader is not None and not is_address(self.grader):
            options["grader"] = local_grader(self.grader)
        task = load_task(**options)
        if isinstance(task, JsonlTask) and task.unread:
            say(f"task {task.label}: {unread_hint(task.unread)}")
        return task


def expected_tokens(options: Mapping[str, Any], task: Task | None = None) -> float:
    """Return the estimated number of new tokens in an answer."""
    usual = 256 if task is None else task.max_new_tokens
    return USED * (options.get("max_new_tokens") or usual)


def crew_of(flags: MineFlags, models: Models, choice: TaskChoice) -> Crew | None:
    """Return the workers of --workers or --ray; None without either. Raises InputError for settings
    that workers cannot reproduce."""
    from lenience.mining.crew import ProcessCrew
    from lenience.mining.ray_crew import RayCrew
    from lenience.mining.work import WorkerPlan
    from lenience.models.threads import cores
    from lenience.tasks.grader import is_address

    if flags.workers is None and flags.ray is None:
        return None
    models.refuse_vllm("mining by workers")
    if choice.grader is not None and not is_address(choice.grader):
        raise InputError(
            f"--grader {choice.grader}: workers need a grader on a server; give its "
            "address"
        )
    named = {"target": models.target, "draft": models.draft}
    names = {role: name and _located(name) for role, name in named.items()}
    asked = choice.loading()
    asked |= {key: _located(asked[key]) for key in ("spec", "data") if asked[key]}
    compiled = {"compile": False if models.compile is False else None}
    threads = 1 if flags.workers is None else max(1, cores() // flags.workers)
    plan = WorkerPlan({**names, **models.loading(), **compiled}, asked, threads)
    if flags.ray is not None:
        return RayCrew(plan, flags.ray, flags.workers)
    assert flags.workers is not None
    return ProcessCrew(plan, flags.workers)


def local_grader(model: str) -> Grader:
    """Load a model that compares answers on this machine. Raises InputError for a server's
    address."""
    if re.match(r"[\w.-]+:\d+", model) and not Path(model).exists():
        raise InputError(
            f"--grader {model}: is a server's address; begin it with http://"
        )
    with loading():
        from lenience.decoding.task_models import ModelGrader

        return ModelGrader(model)


def is_run(folder: Path) -> bool:
    """Return True if a folder names its models."""
    return (folder / SETTINGS).is_file() or (folder / "run.json").is_file()


def known_run(run: Path) -> Path:
    """Return a run folder. Raises InputError for a folder that names no models."""
    if not is_run(run):
        raise InputError(f"{run}: holds no run; lenience mine --out {run} makes one")
    return run


def mined_with(run: Path) -> Models:
    """Return the models that a run was mined with, at their paths of that time. Raises InputError
    if nothing was mined."""
    from lenience.runs.record import read_run

    if not (run / "run.json").is_file():
        raise InputError(
            f"{run}: holds no mining run; lenience mine --out {run} makes one"
        )
    record = read_run(run)
    if "target" not in record.models:
        raise InputError(
            f"{run / 'run.json'}: names no target; mine into a new run folder"
        )
    dtypes = {model.dtype for model in record.models.values()}
    models = Models(dtype=dtypes.pop() if len(dtypes) == 1 else "auto")
    if record.chat:
        models.chat = record.chat.get("use")
        models.system = record.chat.get("system")
        options = record.chat.get("options", {}).items()
        models.template_option = tuple(
            f"{name}={json.dumps(value)}" for name, value in options
        )
    if record.pair != "built-in":
        models.target = record.models["target"].name
        models.draft = record.models["draft"].name if "draft" in record.models else None
    return models


def choice_of(run: Path, choice: TaskChoice) -> TaskChoice:
    """Return the named task, or else the task that the run remembers or was mined on."""
    from lenience.tasks import TASKS

    kept = _kept(run, "task", TaskChoice)
    named = _located(choice.task) if choice.task is not None else kept.task
    if named != kept.task and not _same_benchmark(named, kept.task):
        return choice
    if kept.task is None:
        mined = "wordmath"
        if (run / "run.json").exists():
            mined = str(read_json(run / "run.json").get("task"))
        if mined not in TASKS:
            raise InputError(
                f"--task: {run} was mined on task {mined!r}; name its file"
            )
        kept = TaskChoice(mined)
    if choice.prompt_field is not None or choice.prompt_template is not None:
        kept = replace(kept, prompt_field=None, prompt_template=None)
    others = {}
    for name, value in vars(choice).items():
        if value not in (None, False, ()):
            others[name] = value
    return replace(kept, **others)


def _same_benchmark(first: str | None, second: str | None) -> bool:
    """Return True if two specs name the same benchmark, perhaps with different options."""
    from lenience.tasks import BENCHMARKS

    title = (first or "").partition(":")[0]
    return title in BENCHMARKS and title == (second or "").partition(":")[0]


@contextmanager
def fitting(pair: Pair, task: Task, choice: TaskChoice) -> Iterator[Task]:
    """Provide the task. With --skip-long, prompts that are too long for the pair are left out, and
    their number is reported at the end."""
    if not choice.skip_long:
        yield task
        return
    from lenience.decoding.task_models import without_long

    shorter = without_long(pair, task)
    try:
        yield shorter
    finally:
        if shorter.left_out:
            say(
                f"{len(shorter.left_out)} prompts of task {task.label} exceed the "
                "models' context and were left out"
            )


def left_out(pair: Pair, run: Path, fold: int | None) -> frozenset[str]:
    """Return the digests of the prompts in a benchmark's test fold; none without a fold. Raises
    InputError for a task without folds."""
    from lenience.decoding.task_models import task_for
    from lenience.runs.uses import prompt_digest
    from lenience.tasks import Published

    if fold is None:
        return frozenset()
    task = replace(choice_of(run, TaskChoice()), grader=None).load()
    if not isinstance(task, Published) or not task.is_one_set:
        raise InputError(
            f"--fold {fold}: is for benchmarks without a test set, and {run} was mined "
            f"on {task.label}"
        )
    samples = task_for(pair, task.of_fold(fold)).samples("test")
    return frozenset(
        prompt_digest(pair.target.encode(sample.prompt)) for sample in samples
    )


def models_of(run: Path, models: Models | None) -> Models:
    """Return the named models, or else the models that the run remembers or was mined with."""
    named = models or Models()
    said = _others_than_usual(_kept(run, "models", Models), KEPT)
    said |= _others_than_usual(named, vars(named))
    mined = Models()
    if not {"target", "draft"} <= said.keys() and (run / "run.json").exists():
        mined = mined_with(run)
    return replace(mined, **said)


def remember(run: Path, models: Models, choice: TaskChoice) -> None:
    """Write a run's models and task into RUN/lenience.toml for later commands, with absolute paths
    of local files."""
    lines = ["# What the commands on this run take where no flag says otherwise."]
    for name, given in (
        ("models", _others_than_usual(models, KEPT)),
        ("task", vars(choice)),
    ):
        said = {}
        for key, value in given.items():
            if value not in (None, False, ()):
                said[key] = value
        said.pop("unsafe_local", None)  # must be given each time
        if given.get("chat") is False:
            said["chat"] = False
        for key in said.keys() & {"target", "draft", "task", "data", "grader"}:
            said[key] = _located(said[key])
        lines += ["", f"[{name}]", *(f"{key} = {_as_toml(said[key])}" for key in said)]
    text = "\n".join(lines) + "\n"
    path = run / SETTINGS
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error})") from None


def _others_than_usual(models: Models, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields among `names` that differ from the defaults."""
    given = {}
    for field in fields(Models):
        if field.name in names:
            given[field.name] = getattr(models, field.name)
    found = dict[str, Any]()
    for name, value in given.items():
        if value != getattr(Models(), name):
            found[name] = value
    return found


def _as_toml(value: str | bool | tuple[str, ...]) -> str:
    """Return a value as TOML. Its escapes are JSON's, except those of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _located(value: str) -> str:
    """Return local files or folders by their absolute paths, so that commands find them from other
    folders; other values as they are."""
    from lenience.tasks import TASKS

    if value in TASKS:
        return value
    file = value.rpartition(":")[0]
    if file.endswith(".py") and Path(file).is_file():
        return f"{Path(file).resolve()}:{value.rpartition(':')[2]}"
    files = value.split(",")
    return (
        ",".join(str(Path(name).resolve()) for name in files)
        if _exist(files)
        else value
    )


def _exist(files: list[str]) -> bool:
    return all(file and Path(file).exists() for file in files)


Section = TypeVar("Section", Models, TaskChoice)


def _kept(run: Path, section: str, kind: type[Section]) -> Section:
    """Return a section of RUN/lenience.toml, or the defaults. Raises InputError for wrong
    content."""
    path = run / SETTINGS
    if not path.is_file():
        return kind()
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); fix it or delete it"
        ) from None
    known = {"models": set(KEPT), "task": {field.name for field in fields(TaskChoice)}}
    for name, values in content.items():
        is_section = name in known and isinstance(values, dict)
        others = values.keys() - known[name] if is_section else {name}
        if others:
            raise InputError(f"{path}: has {min(others)}, which is unknown; remove it")
        for key, value in values.items():
            values[key] = _kept_value(path, key, value)
    return kind(**content.get(section, {}))


def _kept_value(path: Path, key: str, value: Any) -> Any:
    """Return the value of a line in RUN/lenience.toml. Raises InputError for a wrong type."""
    if key in SEVERAL:
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise InputError(f"{path}: {key} must be a list of texts, in quotes")
    kind, what = (
        (bool, "true or false") if key in SWITCHES else (str, "a text, in quotes")
    )
    if not isinstance(value, kind):
        raise InputError(f"{path}: {key} must be {what}")
    return value
