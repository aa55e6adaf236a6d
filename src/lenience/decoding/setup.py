"""A decoding's specs taken apart, and whether the parts go together and fit a pair's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lenience.core.errors import InputError
from lenience.core.needs import Layers, Parts, check_offered
from lenience.core.protocols import Rule
from lenience.decoding.certified import Sooner
from lenience.decoding.generation import Generation
from lenience.decoding.options import Decoding
from lenience.drafting.base import DrafterSpec
from lenience.drafting.stops import Stop
from lenience.drafting.trees.shapes import LARGEST, Chain, Tree
from lenience.heads.head import shown_layers
from lenience.models.lm import LAST, LM
from lenience.models.session import check_trees
from lenience.rules.lossless import is_lossless, refuse_forbidden


@dataclass(frozen=True)
class Setup:
    """A decoding with its specs taken apart: what reads, what proposes, what decides."""

    decoding: Decoding
    rule: Rule
    stop: Stop
    drafter: DrafterSpec | None
    """None where one model decodes alone."""
    reader: LM
    tree: Tree = field(default_factory=Chain)
    sooner: Sooner = field(default_factory=Sooner)
    """Where answers end before the end that was certified."""
    seeds_by_prompt: bool = False
    """Whether each prompt has a seed of its own, as none was given."""

    @property
    def branches(self) -> bool:
        """Whether a window may be a tree."""
        return self.drafter is not None and (self.drafter.branches or not self.tree.is_chain)

    @property
    def layers(self) -> Layers:
        """Layers of the target whose states the session keeps for the rule."""
        return self.rule.needs.layers or LAST.layers

    @property
    def keeps_last(self) -> bool:
        """Whether the target keeps its last states for the drafter, as the rule is given others."""
        reads = self.drafter is not None and self.drafter.reads_last
        return reads and self.layers != LAST.layers

    @property
    def verifies_draws(self) -> bool:
        """Whether the rule verifies trees by the chances that their tokens were drawn with."""
        sampling = self.decoding.temperature > 0
        return sampling and self.tree.draws is not None and self.rule.verifies is not None

    @property
    def max_new_tokens(self) -> int:
        """Of an answer as it is given."""
        return self.sooner.max_new_tokens or self.decoding.max_new_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What answers end before."""
        return (*self.decoding.stop_strings, *self.sooner.stop_strings)

    def seed(self, number: int) -> int:
        """Of the sampling of the answer to a prompt, by its number."""
        return self.decoding.seed + (number if self.seeds_by_prompt else 0)

    def answer(self, prompt: list[int], window: int, number: int) -> Generation:
        """The answer to a prompt, to be filled."""
        seed = self.seed(number) if self.decoding.temperature else None
        return Generation(prompt, window, str(self.stop), str(self.tree), seed)

    def columns(self, window: int) -> int:
        """How many tokens are read at most after a prefix, by any model."""
        return self.tree.columns(window) * (self.drafter.joined if self.drafter else 1)


def draft_of(models: Mapping[str, LM], what: str) -> LM:
    """The draft model. Raises InputError, naming what needs it, where there is none."""
    if "draft" not in models:
        raise InputError(f"{what}: needs a draft model; load the pair with one (--draft)")
    return models["draft"]


def check_together(
    setup: Setup, models: Mapping[str, LM], fingerprints: Callable[[], Mapping[str, str]]
) -> None:
    """Raise InputError where the parts of a decoding do not go together."""
    rule, drafter, target = setup.rule, setup.drafter, models["target"]
    assert drafter is not None
    if rule.needs.sampling and setup.decoding.temperature == 0:
        raise InputError(f"rule {rule}: has no greedy form; give a temperature above 0")
    greedy = setup.decoding.temperature == 0 and is_lossless(rule)
    if drafter.remembers and not (greedy or str(rule) == "exact"):
        raise InputError(
            f"drafter {drafter}: proposes by what was answered before, and answers by {rule} "
            "depend on what is proposed; take rule exact, or another drafter"
        )
    drafter.check(target, fingerprints)
    if drafter.reads_last or drafter.features(target):
        target.check_states()
    if setup.keeps_last and drafter.features(target):
        raise InputError(
            f"drafter {drafter}: reads the target's last states and others, and rule {rule} "
            f"those after layers {shown_layers(setup.layers)}; take a judge of the last states"
        )
    if drafter.needs_draft and setup.decoding.window != 0:
        draft_of(models, f"drafter {drafter}")
    _check_offered(setup, drafter)
    if setup.decoding.draft_temperature is not None and not drafter.drafts_by_model:
        raise InputError(
            f"draft_temperature: is of one model that drafts, and drafter {drafter} is none; "
            "leave it out"
        )
    if setup.branches:
        _check_tree(setup, drafter, models)


def _check_offered(setup: Setup, drafter: DrafterSpec) -> None:
    """Raise InputError where the rule or the stop condition needs what windows have not."""
    of_drafter = drafter.offers | Parts.DRAWS | Parts.KEPT_WHOLE
    of_tree = ~Parts.NOTHING
    if setup.branches:  # its last tokens have no states, and one of its paths is kept
        of_tree = ~(Parts.STATES | Parts.KEPT_WHOLE)
        if setup.decoding.temperature > 0 and not setup.verifies_draws:
            of_tree &= ~Parts.DRAWS
    mend = "a drafter alone" if setup.tree.is_chain else "--tree chain"
    for who, needed in (
        (f"rule {setup.rule}", setup.rule.needs.window),
        (f"stop {setup.stop}", setup.stop.needs),
    ):
        check_offered(who, needed, of_drafter, f"drafter {drafter}", "--drafter model")
        check_offered(who, needed, of_tree, "a tree", mend)


def _check_tree(setup: Setup, drafter: DrafterSpec, models: Mapping[str, LM]) -> None:
    """Raise InputError where trees cannot be proposed, read or decided."""
    tree = setup.tree
    if tree.choices() and setup.decoding.window != "auto":
        raise InputError(f"tree {tree}: is picked with window auto; give that, or name a tree")
    for one in tree.choices() or [tree]:
        if not one.is_chain:
            drafter.check_tree(one)
    if (most := tree.size * drafter.joined) > LARGEST:
        raise InputError(
            f"drafter {drafter}, tree {tree}: a tree of up to {most} tokens, and at most {LARGEST} "
            "are read; name a smaller one"
        )
    if not tree.is_chain and setup.decoding.draft_temperature is not None:
        raise InputError("draft_temperature: a chain's tokens have one; leave it out")
    mend = "a drafter alone" if tree.is_chain else "--tree chain"
    if setup.decoding.window != 0:
        check_trees(models["target"], mend)
        if drafter.needs_draft and "draft" in models and not tree.is_chain:
            check_trees(models["draft"], mend)


def check_fit(
    setup: Setup, models: Mapping[str, LM], fingerprints: Callable[[], Mapping[str, str]]
) -> None:
    """Raise InputError where a rule or stop is not for these models or this temperature."""
    decoding, stop = setup.decoding, setup.stop
    refuse_forbidden(setup.rule if setup.drafter else str(decoding.rule))
    if stop.skips_verification:
        refuse_forbidden(str(stop))
    sizes = {role: lm.hidden_size for role, lm in models.items()}
    for part in (setup.rule, stop):
        part.check(fingerprints, sizes)
    heads = (*setup.rule.heads, *stop.heads)
    for one in heads:
        one.check_temperature(decoding.temperature)
    for role in {role for one in heads for role in one.head.inputs.models}:
        models[role].check_states()
