"""Models that tasks need: the target for its own answers in prompts, and local graders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lenience.core.errors import InputError
from lenience.core.files import cache_folder, digest
from lenience.core.progress import Progress, silent
from lenience.core.text_store import TextStore
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.rules.baselines import Baseline
from lenience.tasks import Sample, Task, as_task
from lenience.tasks.base import Messages
from lenience.tasks.user import CheckedTask

PROMPTS_AT_ONCE = 16
"""Batch size of a local model that answers or grades."""
GRADER_TOKENS = 1024
"""Maximum number of tokens in a grader's reply."""


def task_for(pair: Pair, task: Task, progress: Progress = silent) -> Task:
    """Return a task whose prompts may contain answers of the pair's target."""
    task = as_task(task)
    task.attach(partial(own_answers, pair, task.max_new_tokens, progress))
    return task


def without_long(pair: Pair, task: Task) -> CheckedTask:
    """Return the task without samples whose prompts exceed a model's context; `left_out` of the
    task names these samples."""
    models = [lm for lm in pair.models.values() if lm.context_length]

    def fits(sample: Sample) -> bool:
        ids = pair.target.encode(sample.prompt, any_length=True)
        return all(len(ids) < lm.context_length for lm in models if lm.context_length)

    return as_task(task).only(fits)


def own_answers(
    pair: Pair, max_new_tokens: int, progress: Progress, prompts: Sequence[Messages]
) -> list[str]:
    """Return the target's greedy answers to prompts. Answers are cached on disk and decoded
    once."""
    lm = pair.target
    whose = digest([lm.fingerprint, lm.tokenizer_fingerprint, lm.dtype, max_new_tokens])
    kept = TextStore(cache_folder() / "answers" / f"{whose}.jsonl")
    keys = [digest(lm.encode(prompt), 16) for prompt in prompts]
    left = [(key, prompt) for key, prompt in zip(keys, prompts) if key not in kept]
    if left:
        phase = "answering first turns"
        progress(phase, 0, len(left))
        answers = pair.as_completed(
            [prompt for _, prompt in left],
            Decoder(rule=Baseline("target"), max_new_tokens=max_new_tokens),
            batch_size=PROMPTS_AT_ONCE,
        )
        for done, (number, out) in enumerate(answers, 1):
            kept.add(left[number][0], out.text.strip())
            progress(phase, done, len(left))
    return [kept[key] for key in keys]


class ModelGrader:
    """A grader on this machine: a chat model, by its folder or Hub name, that replies greedily.
    Raises InputError if the model has no chat template."""

    def __init__(self, model: str, device: str = "auto"):
        self._pair = load_pair(model, device=device)
        if not self._pair.target.chats:
            raise InputError(
                f"--grader {model}: has no chat template; name a chat model"
            )
        self.name = self.source = (
            f"{Path(model).name} {self._pair.target.fingerprint[:12]}"
        )

    def ask(self, prompts: Sequence[Messages]) -> list[str]:
        """Return the replies to prompts, in order. Raises InputError for a prompt that is too
        long."""
        outs = self._pair.generate_batch(
            list(prompts),
            Decoder(rule=Baseline("target"), max_new_tokens=GRADER_TOKENS),
            batch_size=PROMPTS_AT_ONCE,
        )
        return [out.text for out in outs]
