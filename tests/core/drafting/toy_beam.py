"""What the tests of CARD's growth share: small policies, and a beam that has diverged."""

from __future__ import annotations

from outrider.core.drafting.card import CardGrowth
from outrider.core.params import CardParams, Method, SpeculationParams
from outrider.core.tree import Node
from tests.core.drafting.toy_speculator import ToySpeculator, layers, path_of, toy_model


def policy(
    beam_width: int = 4,
    num_children: int = 3,
    *,
    gamma: int = 3,
    lookahead: int = 6,
    correction: bool = True,
    min_path_probability: float = 0.0,
) -> CardGrowth:
    card = CardParams(beam_width, num_children, correction)
    return CardGrowth(SpeculationParams(Method.CARD, gamma, lookahead, min_path_probability, card=card))


def diverged_session() -> tuple[ToySpeculator, list[Node]]:
    """A hit on a child of the root whose descendants fell out of the beam halfway down. Returns what was left of it in
    the deepest layer that had survivors."""
    for seed in range(100):
        session = ToySpeculator(policy(4, 3), toy_model(1.0, seed))
        session.grow()
        for child in session.tree.root.children.values():
            below = [[node for node in layer if path_of(session.tree, node)[0] == child.token_id]
                     for layer in layers(session.tree)]  # fmt: skip
            if below[1] and not below[-1]:
                survivors = [layer for layer in below if layer][-1]
                assert session.commit([child.token_id]) == 1
                return session, survivors
    raise AssertionError("no beam has diverged")
