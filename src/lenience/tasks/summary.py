"""Tasks scored by ROUGE against a person's text: summaries and continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from lenience.core.errors import InputError, reason
from lenience.tasks.base import Sample, Score
from lenience.tasks.published import SUFFIXES, Published
from lenience.tasks.rows import Row

TEXT_FIELDS = (("article", "highlights"), ("document", "summary"), ("text", "summary"))
"""Names of sources and summaries: CNN/DailyMail, XSum, others."""


@dataclass(kw_only=True)
class RougeTask(Published):
    """Texts scored by `rouge` against the reference, as F-measure with Porter stems, by rouge-score
    (extra "rouge"). A response's loss is 1 − ROUGE, and it counts as right from 0.5 on. Two texts
    agree if their ROUGE differs by at most `within`; the loss against the target's own text is the
    difference of their ROUGE."""

    version = 1
    by_degree = True
    same_where_wrong = True
    rouge: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeL"
    within: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.within <= 1:
            raise InputError(
                f"{self.title}'s within must be from 0 to 1, not {self.within:g}"
            )
        self.measure = self.rouge.replace("rouge", "ROUGE-")
        self.loss_is = (
            f"by how much {self.measure} is lower than the target's, on average"
        )
        self.disagreement_is = (
            f"the share of prompts on which {self.measure} is not the target's within "
            f"{self.within:g}"
        )

    def open(self, data: str) -> Self:
        _scorer(self.rouge)  # raises without rouge-score, before anything is decoded
        return super().open(data)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text.strip() or None

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        if a is None or b is None:
            return None
        if sample is None or sample.reference is None:
            return a == b
        return abs(self.quality(a, sample) - self.quality(b, sample)) <= self.within

    def quality(self, text: str, sample: Sample) -> float:
        """Return the ROUGE F-measure of a text against the sample's reference, in [0, 1]."""
        assert sample.reference is not None
        scores = _scorer(self.rouge)(sample.reference, text)
        return float(scores[self.rouge].fmeasure)

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        losses = [1 - self.quality(text, sample) for text, sample in pairs]
        return [Score(loss <= 0.5, loss) for loss in losses]

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        return max(0.0, self.quality(target_text, sample) - self.quality(text, sample))


@dataclass(kw_only=True)
class Summary(RougeTask):
    """Summaries of articles (CNN/DailyMail, See 2017): rows {article, highlights}, or XSum's
    {document, summary}. The prompt asks for a few sentences."""

    title: ClassVar[str] = "summary"
    max_new_tokens = 160

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        names = next(
            (pair for pair in TEXT_FIELDS if set(pair) <= row.keys()), TEXT_FIELDS[0]
        )
        text, summary = (str(row[name]).strip() for name in names)
        prompt = (
            f"Summarize the following article in a few sentences.\n\n{text}\n\nSummary:"
        )
        return Sample(str(row.get("id", "")), prompt, summary)


@dataclass(kw_only=True)
class ContinuationTask(RougeTask):
    """Sentences to continue, as with LM1B (Chelba 2013): a text file with one sentence per line, or
    rows {text}. The first `words` words are the prompt; the next 16 words, about 20 tokens, are the
    reference."""

    title: ClassVar[str] = "continuation"
    max_new_tokens = 20
    words: int = 10
    suffixes: ClassVar[tuple[str, ...]] = (*SUFFIXES, ".txt")
    FOLLOWING: ClassVar[int] = 16
    """Number of words in about 20 tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words < 1:
            raise InputError(
                f"continuation's words must be 1 or more, not {self.words}"
            )

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        words = str(row["text"]).split()
        rest = words[self.words : self.words + self.FOLLOWING]
        if len(rest) < 2:  # too short a sentence to score
            return None
        return Sample(
            str(row.get("id", "")), " ".join(words[: self.words]), " ".join(rest)
        )

    def _rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        if path.suffix.lower() != ".txt":
            yield from super()._rows(path)
            return
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({reason(error)})") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}, line {number}", {"text": line}


@cache
def _scorer(rouge: str) -> Callable[[str, str], Any]:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "ROUGE needs rouge-score: pip install 'lenience[rouge]'"
        ) from None
    score: Callable[[str, str], Any] = RougeScorer([rouge], use_stemmer=True).score
    return score
