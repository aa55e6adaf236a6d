"""Endpoints on the command line: a reference and candidates in place of a pair's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Group, Parameter

from lenience.cli.console import counted, say, screen
from lenience.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lenience.certification.question import CertifyConfig
    from lenience.decoding.decoder import Decoder
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.integrations.endpoints.endpoint import Endpoint
    from lenience.integrations.endpoints.pair import ServedPair
    from lenience.integrations.endpoints.speed import EndpointSpeed
    from lenience.tasks import Sample, Task

STORE = "requests.jsonl"
"""File of a run's answers from servers."""
MILLION = 1_000_000
FLOOR = 20
"""Number of prompts that each server answers twice."""
GROUP = Group("Servers", sort_key=3)
Several = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Claims = Annotated[Several, Parameter(name="--claim", group=GROUP)]


@Parameter(name="*", group=GROUP)
@dataclass
class Servers:
    reference: str | None = None
    """Server with OpenAI's API that takes the target's place: URL, or 'URL; model=…; body={…};
    name=…; api=completions; key-env=VAR; key-file=PATH'. Implies --engine openai."""
    candidate: Several = ()
    """Server to compare with the reference, written like --reference; may be repeated, the most
    cautious first. The same URL may be given again with another body."""
    in_flight: int = 32
    """Maximum number of requests sent to a server at once."""
    price: str | None = None
    """Prices per million tokens, PROMPT,COMPLETION, to print the cost."""

    @property
    def named(self) -> bool:
        return self.reference is not None or bool(self.candidate)

    def pair(
        self,
        system: str | None,
        store: Path | None = None,
        claims: tuple[str, ...] = (),
    ) -> Pair:
        """Return the endpoints in the role of a pair. Raises InputError for a missing or wrong
        endpoint."""
        from lenience.integrations.endpoints.endpoint import Endpoint
        from lenience.integrations.endpoints.pair import ServedOptions, ServedPair

        if self.reference is None:
            raise InputError(
                "--candidate: needs --reference, the server to compare with"
            )
        if self.in_flight < 1:
            raise InputError(f"--in-flight {self.in_flight}: must be 1 or more")
        self.prices()
        reference = Endpoint.parse(self.reference, "--reference", "reference")
        others = []
        for number, text in enumerate(self.candidate, 1):
            others.append(Endpoint.parse(text, "--candidate", f"candidate-{number}"))
        options = ServedOptions(self.in_flight, system, store, claims)
        with screen.status("asking the servers"):
            return cast("Pair", ServedPair(reference, others, options))

    def settings(self) -> tuple[str, ...]:
        """Return the candidates as settings, in their order. Raises InputError if there is none."""
        from lenience.integrations.endpoints.endpoint import Endpoint
        from lenience.rules.baselines import SERVED

        if not self.named:
            return ()
        if not self.candidate:
            raise InputError("--reference: needs --candidate, the server to compare")
        return tuple(
            f"{SERVED}{Endpoint.parse(text, '--candidate', f'candidate-{n}').name}; window=0"
            for n, text in enumerate(self.candidate, 1)
        )

    def prices(self) -> tuple[float, float] | None:
        """Return the prices of one prompt token and one answer token; None without --price."""
        if self.price is None:
            return None
        try:
            prompt, answer = map(float, self.price.split(","))
        except ValueError:
            raise InputError(
                f"--price {self.price}: write PROMPT,COMPLETION, such as 0.15,0.60"
            ) from None
        return prompt / MILLION, answer / MILLION

    def say_plan(self, samples: list[Sample], draws: int, max_new_tokens: int) -> None:
        """Print the maximum number of requests and tokens of a run: `draws` answers to each sample
        from every server, and one more to the first FLOOR samples."""
        servers = 1 + len(self.candidate)
        answers = servers * (draws * len(samples) + min(FLOOR, len(samples)))
        text = sum(len(str(sample.prompt)) for sample in samples) / len(samples)
        read = round(answers * text / 4)
        written = answers * max_new_tokens
        cost = self._cost(read, written)
        say(
            f"at most {counted(answers, 'request')}, about {read:,} prompt tokens and at most "
            f"{written:,} new tokens{cost}"
        )

    def say_used(self, pair: Any) -> None:
        """Print the numbers of requests and tokens of a run."""
        usage = pair.client.usage
        cost = self._cost(usage.prompt_tokens, usage.completion_tokens)
        retries = pair.client.retries
        again = f", {retries} sent again" if retries else ""
        say(
            f"{counted(usage.requests, 'request')}{again}: {usage.prompt_tokens:,} prompt tokens, "
            f"{usage.completion_tokens:,} new tokens{cost}"
        )

    def _cost(self, read: int, written: int) -> str:
        prices = self.prices()
        if prices is None:
            return ""
        return f", {read * prices[0] + written * prices[1]:.2f} at --price"


def served_answers(
    pair: ServedPair, prompts: list[Any], options: Mapping[str, Any]
) -> Iterator[list[tuple[Endpoint, Generation]]]:
    """Yield the answers of all endpoints to each prompt, the reference's first."""
    from lenience.decoding.decoder import Decoder
    from lenience.rules.baselines import SERVED

    rules = ["target", *(f"{SERVED}{name}" for name in pair.candidates)]
    columns = []
    for endpoint, rule in zip(pair.endpoints, rules):
        decoder = Decoder.of({**options, "rule": rule, "window": 0})
        with screen.status(f"asking {endpoint.name}"):
            columns.append(pair.generate_batch(prompts, decoder))
    for row in zip(*columns):
        yield list(zip(pair.endpoints, row))


def print_cost_and_noise(
    servers: Servers, pair: Pair, config: CertifyConfig, task: Task
) -> None:
    """Print the maximum cost of a certificate, and how often each server differs from itself."""
    from lenience.runs.answers import for_task
    from lenience.tasks import take

    samples = take(task, config.split, config.num_prompts())
    most = config.options.get("max_new_tokens", task.max_new_tokens)
    servers.say_plan(samples, config.draws, most)
    decoder = for_task(config.decoder, config.options, task)
    alone = decoder.for_target().with_parts(window=0)
    measure_noise(cast("ServedPair", pair), task, samples[:FLOOR], alone)


def measure_noise(
    pair: ServedPair, task: Task, samples: list[Sample], decoder: Decoder
) -> None:
    """Measure and print how often each server differs from itself, and keep the counts in the
    pair."""
    prompts = [sample.prompt for sample in samples]
    counts = {}
    for endpoint in pair.endpoints:
        with screen.status(f"{endpoint.name} against itself"):
            both = pair.floor(endpoint, prompts, decoder)
        texts = sum(a != b for a, b in both)
        answers = sum(
            a != b
            and task.same(task.answer(a, sample), task.answer(b, sample), sample)
            is not True
            for (a, b), sample in zip(both, samples)
        )
        counts[endpoint.name] = {
            "n": len(both),
            "other_texts": texts,
            "other_answers": answers,
        }
        say(
            f"{endpoint.name} against itself on {counted(len(both), 'prompt')}: "
            f"{texts} other texts, {answers} other answers"
        )
    if any(of["other_answers"] for of in counts.values()):
        say("batching changes answers, and may cause a loss of up to that size")
    pair.noise = counts.pop(pair.reference.name)
    pair.candidate_noise = counts


def print_speeds(speeds: list[EndpointSpeed]) -> None:
    """Print the speed of each endpoint."""
    from rich.table import Table

    table = Table("endpoint", title=f"{speeds[0].in_flight} requests at once, in turns")
    for column in ("tokens/s", "first token, ms", "between tokens, ms"):
        table.add_column(column, justify="right")
    for speed in speeds:
        table.add_row(
            speed.name,
            _interval(speed.tokens_per_second, 1),
            _interval(speed.first_token, 1000),
            _interval(speed.between_tokens, 1000),
        )
    screen.print(table)


def _interval(figure: tuple[float, float, float], scale: float) -> str:
    middle, low, high = (scale * part for part in figure)
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"
