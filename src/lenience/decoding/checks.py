"""Checks that the parts of a decoder fit together and fit a pair's models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

from lenience.core.errors import InputError
from lenience.core.needs import Parts, Requirement, Sources
from lenience.decoding.decoder import Decoder
from lenience.drafting.model import DraftModel
from lenience.drafting.trees.shapes import LARGEST
from lenience.heads.head import shown_layers
from lenience.models.lm import LM
from lenience.models.session import check_trees
from lenience.models.translation import shares_vocabulary
from lenience.rules.baselines import served
from lenience.rules.lossless import is_lossless, refuse_forbidden, refuse_lossy

TRANSLATED = (
    "the draft has another tokenizer than the target, and its tokens are translated"
)


def draft_of(models: Mapping[str, LM], what: str) -> LM:
    """Return the draft model. Raises InputError that names the feature `what` if there is no draft
    model."""
    if "draft" not in models:
        raise InputError(
            f"{what}: needs a draft model; load the pair with one (--draft)"
        )
    return models["draft"]


def share_vocabulary(models: Mapping[str, LM]) -> bool:
    """Return True unless the draft model has another tokenizer than the target."""
    return "draft" not in models or shares_vocabulary(models["target"], models["draft"])


def check_decoder(
    decoder: Decoder,
    models: Mapping[str, LM],
    fingerprints: Callable[[], Mapping[str, str]],
) -> None:
    """Raise InputError if the parts of a decoder do not fit together. The same holds if its rule,
    stop condition or drafter is not for these models or this temperature."""
    if decoder.alone == "draft":
        draft_of(models, "rule draft")
        if not share_vocabulary(models):
            raise InputError(f"rule draft: {TRANSLATED}; take rule target or exact")
    if served(decoder.rule) is not None:
        raise InputError(
            f"rule {decoder.rule}: is a server's; name it with --reference and --candidate"
        )
    if decoder.proposer is not None:
        _check_rule(decoder)
        _check_drafter(decoder, models, fingerprints)
        _check_offered(decoder, models)
        if decoder.branches:
            _check_tree(decoder, models)
    _check_fit(decoder, models, fingerprints)


def _check_rule(decoder: Decoder) -> None:
    """Raise InputError if the rule has no form for this temperature, or depends on proposals that
    come from earlier answers."""
    rule = decoder.rule
    drafter = decoder.drafter
    if rule.needs.sampling and decoder.temperature == 0:
        raise InputError(f"rule {rule}: has no greedy form; give a temperature above 0")
    greedy = decoder.temperature == 0 and is_lossless(rule)
    is_strict = greedy or decoder.is_exact
    if Sources.EARLIER_ANSWERS in drafter.needs and not is_strict:
        raise InputError(
            f"drafter {drafter}: proposes tokens from earlier answers, and answers by "
            f"rule {rule} "
            "depend on the proposals; use rule exact, or another drafter"
        )


def _check_drafter(
    decoder: Decoder,
    models: Mapping[str, LM],
    fingerprints: Callable[[], Mapping[str, str]],
) -> None:
    """Raise InputError if the models lack what the drafter reads."""
    drafter = decoder.drafter
    target = models["target"]
    drafter.check(target, fingerprints)
    if drafter.needs & Sources.STATES:
        target.check_states()
    if decoder.keeps_last and Sources.LAYER_STATES in drafter.needs:
        raise InputError(
            f"drafter {drafter}: reads the target's last states and those of other "
            f"layers, and rule {decoder.rule} "
            f"reads those after layers {shown_layers(decoder.layers)}; use a judge of "
            "the last states"
        )
    if not drafter.needs_draft:
        return
    if decoder.window != 0:
        draft_of(models, f"drafter {drafter}")
    if not share_vocabulary(models) and not isinstance(drafter, DraftModel):
        raise InputError(
            f"drafter {drafter}: {TRANSLATED}; take --drafter model or ngram"
        )


def _check_offered(decoder: Decoder, models: Mapping[str, LM]) -> None:
    """Raise InputError if a part of the decoder needs parts of windows that another part does not
    offer."""
    for requirement in _requirements(decoder):
        for giver, offered, fix in _offers(decoder, models):
            requirement.check(giver, offered, fix)


def _requirements(decoder: Decoder) -> Iterator[Requirement]:
    """Yield what the parts of a decoder need."""
    yield Requirement(f"rule {decoder.rule}", decoder.rule.needs.window)
    yield Requirement(f"stop {decoder.stop}", decoder.stop.needs)
    if decoder.tree_shapes:
        yield Requirement(f"tree {decoder.tree}", Parts.TREES, "--tree chain")
    if decoder.draft_temperature is not None:
        who = f"draft_temperature {decoder.draft_temperature:g}"
        yield Requirement(who, Parts.OWN_TEMPERATURE, "leave it out")


def _offers(
    decoder: Decoder, models: Mapping[str, LM]
) -> Iterator[tuple[str, Parts, str]]:
    """Yield the names of the drafter, the tree and the translation, with the parts of windows that
    each offers, and the fix for a message."""
    always = Parts.DRAWS | Parts.KEPT_WHOLE
    for member in decoder.drafter.members:
        if Parts.TREES not in member.offers:
            yield f"drafter {member}", ~Parts.TREES, "take another drafter"
    drafter = decoder.drafter
    yield f"drafter {drafter}", drafter.offers | always, "take --drafter model"
    if decoder.branches:
        # leaves have no states, and one path is kept
        lacking = Parts.STATES | Parts.KEPT_WHOLE | Parts.OWN_TEMPERATURE
        if decoder.temperature > 0 and not decoder.verifies_draws:
            lacking |= Parts.DRAWS
        fix = "a drafter alone" if decoder.tree.is_chain else "--tree chain"
        yield "a tree", ~lacking, f"take {fix}"
    if drafter.needs_draft and not share_vocabulary(models):
        offered = Parts.EARLY_ENDS | always
        if decoder.temperature > 0:
            offered |= Parts.PROBS
        giver = "a draft with another tokenizer, whose tokens are translated,"
        yield giver, offered, "take a draft of the target's family"


def _check_tree(decoder: Decoder, models: Mapping[str, LM]) -> None:
    """Raise InputError if the drafter cannot propose this tree or a model cannot run on trees."""
    drafter = decoder.drafter
    tree = decoder.tree
    if tree.choices() and decoder.window != "auto":
        raise InputError(f"tree {tree}: needs window auto; give it, or name a tree")
    for shape in decoder.tree_shapes:
        drafter.check_tree(shape)
    most = tree.size * len(drafter.members)
    if most > LARGEST:
        raise InputError(
            f"drafter {drafter}, tree {tree}: a tree of up to {most} tokens, and at "
            f"most {LARGEST} "
            "are read; name a smaller one"
        )
    if decoder.window != 0:
        fix = "a drafter alone" if tree.is_chain else "--tree chain"
        check_trees(models["target"], fix)
        if drafter.needs_draft and "draft" in models and not tree.is_chain:
            check_trees(models["draft"], fix)


def _check_fit(
    decoder: Decoder,
    models: Mapping[str, LM],
    fingerprints: Callable[[], Mapping[str, str]],
) -> None:
    """Raise InputError if the rule or the stop condition is not for these models or this
    temperature."""
    stop = decoder.stop
    refuse_forbidden(decoder.rule)
    if stop.skips_verification:
        refuse_lossy(f"stop {stop}")
    sizes = {role: lm.hidden_size for role, lm in models.items()}
    for part in (decoder.rule, stop):
        part.check(fingerprints, sizes)
    for head in (*decoder.rule.heads, *stop.heads):
        head.check_temperature(decoder.temperature)
        for role in head.head.inputs.models:
            models[role].check_states()


def warn_of_another_drafter(decoder: Decoder) -> None:
    """Warn of a head that was trained with another drafter."""
    drafter = decoder.drafter
    for part in decoder.rule.heads:
        if part.head.drafter != drafter.record:
            mined = (part.head.drafter or {"spec": "model"})["spec"]
            warnings.warn(
                f"rule {decoder.rule}, drafter {drafter}: the {part.head.role} was mined with "
                f"drafter {mined} and may lose far more answers on this one's tokens; certify it",
                stacklevel=4,
            )
            return


def warn_of_translation(target: LM, draft: LM) -> None:
    """Warn that the proposals of a draft with another tokenizer are translated."""
    if shares_vocabulary(target, draft):
        return
    ours = target.tokenizer.get_vocab()
    theirs = draft.tokenizer.get_vocab()
    both = ours.keys() & theirs.keys()
    differences = {
        "tokens of the target that the draft lacks": ours.keys() - theirs.keys(),
        "tokens of the draft that the target lacks": theirs.keys() - ours.keys(),
        "tokens with another id": {
            token for token in both if ours[token] != theirs[token]
        },
    }
    parts = []
    for what, tokens in differences.items():
        if tokens:
            parts.append(f"{len(tokens)} {what}, such as {min(tokens)!r}")
    warnings.warn(
        f"the vocabularies of {target.name!r} and {draft.name!r} differ ({'; '.join(parts)}): the "
        "draft's proposals are translated, which is slower than a draft of the target's family",
        stacklevel=3,
    )
