"""Methods of speculation and their parameters, resolved: every field has a value, and every value is in its range.

A `Method` describes a way to draft, in one place: growth, waiting, parameters, names. All of them are in
`outrider.core.methods`, one file each. `SpeculationParams` decide how fast a generation comes, and `Steering` changes
them while it runs. A value outside its range raises `InvalidParameter` when the parameters are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar, cast

from outrider.core.growth import GrowthPolicy
from outrider.core.params import SOURCES, TIERS, AcceptanceRule, RetrievalScope, Rows, Source, check
from outrider.core.retrieval.plan import RetrievalPlan

# Bounds of a request's parameters: they keep a forward, a message and a tree of one session small.
MAX_BEAM_WIDTH = 256
MAX_BUDGET = 256
MAX_ROWS = 64
MAX_ASKED_MATCH_LEN = 10


def check_range(field_name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidParameter unless a field of the speculation lies between two bounds."""
    # NaN lies in no range, so it is refused here without a test of its own.
    check(low <= value <= high, f"speculation.{field_name}", f"in [{low:g}, {high:g}]", value)


class Waiting(Enum):
    """The rule for waiting for a draft when there is nothing to verify."""

    NEVER = 0
    WORTH = 1
    """The target waits while the draft is expected to be worth more than the time."""
    BY_BATCH = 3
    """The same as WORTH, but never if so many sessions share forwards that a wait costs more (`critical_batch`)."""
    ALWAYS = 2
    """The target waits whatever the draft is worth, but not for a drafter that is stuck."""
    IN_TURNS = 4
    """Draft-then-verify: the target waits as for ALWAYS, and nothing grows while it verifies."""

    @property
    def is_certain(self) -> bool:
        """True if the target waits whatever the draft is worth."""
        return self in (Waiting.ALWAYS, Waiting.IN_TURNS)


class Fallback(Enum):
    """The reaction to a miss. The values are those of the wire."""

    AUTO = 1
    """The cheapest reaction, by the number of sessions and the measured times."""
    DRAFT = 2
    """The target waits for a chain that is drafted now."""
    RETRIEVAL = 3
    """A retrieved chain."""
    PLAIN = 4
    """One plain token."""
    RANDOM = 5
    """Random tokens, for comparison: wasted rows instead of a wait (the paper's fast backup)."""


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Limits of a request's parameters: a greater value is refused, and the message states the limit. A method's own
    parameter `x` has the limit `max_x`."""

    max_num_speculative_tokens: int = 64
    max_num_rows: int = MAX_ROWS
    """Limit of `max_rows`."""
    max_beam_width: int = MAX_BEAM_WIDTH
    max_budget: int = MAX_BUDGET
    """Limit of the outcomes that SAGUARO drafts for at a time."""
    spacelike_scope: RetrievalScope = RetrievalScope.TENANT
    """Default scope of a method that needs the datastore: in a scope of its own, a session has nothing to look up."""

    @property
    def max_lookahead(self) -> int:
        """Limit of `lookahead`: sixteen full chains in flight hide any round trip that is worth hiding."""
        return 16 * self.max_num_speculative_tokens


@dataclass(frozen=True, slots=True)
class MethodParams:
    """A method's own parameters: base of frozen dataclasses with the fields of the method's message on the wire.

    A field is a number, a flag, a member of an enum with the wire's values, or a tuple of these. For a tuple of
    members, `choices` in the metadata lists the allowed ones.
    """

    def check(self, params: SpeculationParams, limits: SpeculationLimits | None = None) -> None:
        """Raises InvalidParameter if these contradict the other parameters, or exceed a server's limits."""

    def meaningless(self, given: Collection[str], *, is_ratio: bool) -> Iterator[tuple[str, str]]:
        """Yields the fields that have no meaning next to the given ones, each with the rule that a request with it
        breaks.

        Args:
            given: Names of the fields that were given.
            is_ratio: True under the ratio rule.
        """
        yield from ()


_Own = TypeVar("_Own", bound=MethodParams)

Choice: TypeAlias = "tuple[Method, Rows, bool]"
"""A method, the rows that its rounds spend, and whether it retrieves."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A method as in its paper, by fields of `SpeculationParams` on the wire; enums are members of the domain's
    enums."""

    paper: str
    fixed: Mapping[str, Any]
    """Parameters that define the method: another value is refused."""
    tunable: Mapping[str, Any]
    """Parameters that the paper tunes to models and hardware: defaults."""


AS_SAMPLED: Mapping[str, Any] = {
    "acceptance_rule": AcceptanceRule.RATIO,
    "min_path_probability": 0.0,
    "calibration": False,
}
"""Preset parameters of sampled drafts: they are kept by the ratio rule. At temperature 0 that is greedy matching."""
AS_PICKED: Mapping[str, Any] = {
    "acceptance_rule": AcceptanceRule.MATCH,
    "min_path_probability": 0.0,
    "shared_noise": False,
    "calibration": False,
}
"""Preset parameters of picked drafts: the draft model's best tokens are kept if the target says the same."""


@dataclass(frozen=True, eq=False, repr=False)
class Method:
    """A way to grow the draft tree and to wait for it. There is one object of each, so methods are compared by `is`."""

    name: str
    """As users write it: "best-first"."""
    meaning: str
    """The method in half a sentence, for the legend of the gateway's page."""
    colour: str
    """Its colour in plots: from Okabe and Ito's palette, or from Paul Tol's, as the first has too few colours."""
    page_colour: str = "other"
    """Its colour on the page, by a name in the style sheet; all methods that auto never chooses share one."""
    parameters: type[MethodParams] | None = None
    """Its own parameters."""
    grow: Callable[[SpeculationParams], GrowthPolicy] | None = None
    """Makes a session's growth policy. None means that no drafts grow by this method itself."""
    waiting: Waiting | Callable[[SpeculationParams], Waiting] = Waiting.WORTH
    """The rule for waiting for drafts; for some methods a function of the parameters. See `waits`."""
    rows: Rows = Rows.CHAIN
    """Default use of the rows."""
    takes_as_pay: bool = False
    """True if it takes as many nodes as pay. Then only the limit bounds a path, drafting in turns ends when another
    forward is not worth its time, and retrieved tokens may take a draft's place."""
    samples: bool = False
    """True if its drafted tokens can be samples of the draft model, as the ratio rule needs them."""
    always_retrieves: bool = False
    """True if it looks up continuations even if the request does not ask for it."""
    plans: tuple[Callable[[SpeculationParams], RetrievalPlan | None], ...] = ()
    """Own plans of retrieval: of the verifier, and of the speculator. Empty means that the request's sources decide."""
    needs_datastore: bool = False
    """True if it does nothing without a datastore: it drafts from other sessions' outputs."""
    no_prediction: str = ""
    """Set if the method cannot use a predicted text: the words of the error after "empty with method NAME"."""
    fallback: Callable[[SpeculationParams], Fallback] | None = None
    """Returns the substitute for a draft after a miss. None means that there is none."""
    choices: Callable[[Rows, bool, bool], tuple[Choice, ...]] | None = None
    """Returns the choices of this method, the one expected to be best first, by its rows, whether it retrieves, and
    whether both models share a GPU. None means that it does not choose, but is used itself."""
    as_chosen: Callable[[SpeculationParams], SpeculationParams] | None = None
    """Converts the parameters of the method that has chosen this one for this one. None: they stay as they are."""
    on_shared_gpu: Callable[[SpeculationParams, Collection[str]], SpeculationParams] | None = None
    """Converts the parameters if both models share a GPU, by the fields that the request gives. None: they stay as they
    are."""
    published: Preset | None = None
    """The method as in its paper."""

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    # Every round of every session reads these.

    @cached_property
    def field(self) -> str:
        """Its name within names: the field of its own parameters; in capitals, the member of the wire's enum."""
        return self.name.replace("-", "_")

    @property
    def is_auto(self) -> bool:
        """True if the verifier chooses among other methods, round after round."""
        return self.choices is not None

    @cached_property
    def is_off(self) -> bool:
        """True if nothing is ever drafted."""
        return not (self.has_draft_model or self.always_retrieves)

    @property
    def needs_draft_model(self) -> bool:
        """True if the method does nothing without a speculator."""
        return self.grow is not None

    @cached_property
    def has_draft_model(self) -> bool:
        """True if a speculator grows the tree, if there is one."""
        return self.needs_draft_model or self.is_auto

    @cached_property
    def drafts_ahead(self) -> bool:
        """True if the tree can grow while the target verifies."""
        return self.has_draft_model and self.waiting is not Waiting.IN_TURNS

    @cached_property
    def may_branch(self) -> bool:
        """True if rows may be those of a tree."""
        return self.has_draft_model or (self.always_retrieves and not self.plans)

    def bounds_paths(self, rows: Rows) -> bool:
        """Returns True if `min_path_probability` bounds paths: nodes that are taken as long as they pay need no
        bound."""
        # Auto has a bound, for the methods that it chooses.
        return not (self.takes_as_pay and self.needs_draft_model and rows is Rows.TREE)

    def waits(self, params: SpeculationParams) -> Waiting:
        """Returns how rounds of this method wait. The parameters may be those of a method that chose this one."""
        return self.waiting(params) if callable(self.waiting) else self.waiting


OFF = Method("off", "no guesses: the model writes alone", "#444444", "target", waiting=Waiting.NEVER)
"""Draws one token after the other, without drafts."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Parameters of drafting and of verification. They decide how fast a text comes, and under the match rule never
    which text."""

    method: Method = OFF
    num_speculative_tokens: int = 8
    """Most tokens of a path verified in one round (gamma)."""
    lookahead: int = 8
    """Most tokens beyond the committed ones that the speculator may draft."""
    min_path_probability: float = 0.0
    """A chain ends where the draft model's probability of the whole path falls below this. 0 means never."""
    rows: Rows = Rows.CHAIN
    """Use of the rows of a target forward."""
    max_rows: int = 0
    """Most drafted rows of one target forward, for Rows.TREE. 0 means as many as pay, by the measured forward times."""
    acceptance_rule: AcceptanceRule = AcceptanceRule.MATCH
    shared_noise: bool = True
    """True if the speculator ranks tokens with the target's own noise (Daliri, Musco, Suresh 2024). False means by its
    own probabilities alone, for comparison."""
    calibration: bool = True
    """True if drafts are scored by how often the target has agreed with such drafts, and as many are verified as pay.
    False means as in the papers, for comparison: the draft model's own probabilities, phrases of fixed length, chains
    and tails verified whole."""
    retrieval: bool = False
    """True if retrieved continuations are put after the chain, and in its place if it is empty."""
    retrieval_scope: RetrievalScope = RetrievalScope.SESSION
    """Sessions that share their tokens for retrieval."""
    contribute: bool = False
    """True if the other sessions of the scope may retrieve this session's tokens."""
    sources: tuple[Source, ...] = TIERS
    """Sources that are looked up, the preferred first. A method with its own plans has its own sources."""
    remote: bool = False
    """True if the datastore is asked for every tier, and no copy in a model service is looked up."""
    own: tuple[MethodParams, ...] = ()
    """Parameters of single methods, see `of`. Default parameters are left out."""

    def __post_init__(self) -> None:
        gamma, method = self.num_speculative_tokens, self.method
        check(gamma >= 1, "speculation.num_speculative_tokens", ">= 1", gamma)
        rule = f">= num_speculative_tokens ({gamma})"
        check(self.lookahead >= gamma, "speculation.lookahead", rule, self.lookahead)
        probability = self.min_path_probability
        check(0 <= probability < 1, "speculation.min_path_probability", "in [0, 1)", probability)
        check_range("max_rows", self.max_rows, 0, MAX_ROWS)
        is_ratio = self.acceptance_rule is AcceptanceRule.RATIO
        is_tree = self.rows is Rows.TREE
        # Rules name fields and values as on the wire: callers read these messages.
        check(
            method.may_branch or not is_tree,
            "speculation.rows",
            "ROWS_CHAIN for a method without a draft model other than METHOD_RETRIEVAL",
            "ROWS_TREE",
        )
        rule = "ROWS_CHAIN under the ratio rule: it judges one sample after the other"
        check(not (is_ratio and is_tree), "speculation.rows", rule, "ROWS_TREE")
        rule = "false with method off"
        check(not (self.retrieval and method.is_off), "speculation.retrieval", rule, self.retrieval)
        rule = "true with method off or auto, which chooses by calibrated scores"
        check(self.calibration or not (method.is_off or method.is_auto), "speculation.calibration", rule, False)
        check(
            not (self.contribute and self.retrieval_scope is RetrievalScope.SESSION),
            "speculation.retrieval_params.contribute",
            "unset or false with the scope of one session",
            self.contribute,
        )
        self._check_sources()
        own = sorted((each for each in self.own if each != type(each)()), key=lambda each: type(each).__name__)
        object.__setattr__(self, "own", tuple(own))
        for each in own:
            each.check(self)

    def _check_sources(self) -> None:
        field = "speculation.retrieval_params.sources"
        names = ", ".join(f"SOURCE_{known.name}" for known in SOURCES)
        for index, source in enumerate(self.sources):
            is_new = source in SOURCES and source not in self.sources[:index]
            check(is_new, f"{field}[{index}]", f"one of {names}, each at most once", f"SOURCE_{source.name}")
        check(bool(self.sources), field, "at least one source", "none")
        without = not self.method.plans or self.sources == TIERS
        rule = f"unset for method {self.method.name}, whose own parameters decide where it looks"
        check(without, field, rule, ", ".join(f"SOURCE_{each.name}" for each in self.sources))
        field = "speculation.retrieval_params.remote"
        rule = f"unset or false for method {self.method.name}, which decides itself where it looks"
        check(not (self.remote and self.method.plans), field, rule, self.remote)
        has_tier = any(source in TIERS for source in self.sources)
        check(
            has_tier or not self.remote,
            field,
            "unset or false unless sources name a tier of the datastore",
            self.remote,
        )

    @property
    def retrieves(self) -> bool:
        """True if continuations are looked up."""
        return self.retrieval or self.method.always_retrieves

    @property
    def min_path_logprob(self) -> float:
        """The logarithm of `min_path_probability`; minus infinity for 0."""
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    def of(self, kind: type[_Own]) -> _Own:
        """Returns a method's own parameters: its defaults unless others are set."""
        return next((each for each in self.own if isinstance(each, kind)), None) or _defaults(kind)

    def with_own(self, *own: MethodParams) -> SpeculationParams:
        """Returns these parameters with others of single methods."""
        kinds = tuple(map(type, own))
        return replace(self, own=(*(each for each in self.own if not isinstance(each, kinds)), *own))

    def by_match(self) -> SpeculationParams:
        """Returns these parameters under the match rule: parameters without meaning under that rule have their
        defaults."""
        own = (
            replace(
                each, **{name: getattr(_defaults(type(each)), name) for name, _ in each.meaningless((), is_ratio=False)}
            )
            for each in self.own
        )
        return replace(self, acceptance_rule=AcceptanceRule.MATCH, own=tuple(own))

    @property
    def is_ratio(self) -> bool:
        """True if the ratio rule was asked for. At temperature 0 both rules agree, and drafts need no q."""
        return self.acceptance_rule is AcceptanceRule.RATIO


@cache
def _made(kind: Any) -> Any:
    return kind()


def _defaults(kind: type[_Own]) -> _Own:
    return cast(_Own, _made(cast(Hashable, kind)))  # mypy takes no class of dataclasses for hashable


@dataclass(frozen=True, slots=True)
class Steering:
    """A change of parameters for a drafter while a generation runs. Nodes that have grown stay."""

    speculation: SpeculationParams | None = None
    """Parameters to grow by from now on; those of method off pause the drafter. None means no change."""
    forward_us: int = 0
    """Time of one forward of the target, in microseconds. 0 means no change."""
    round_trip_us: int = 0
    """Time from a commit to the first draft that answers it, without the drafting itself, in microseconds. 0 means no
    change."""
    max_num_nodes: int = 0
    """Most nodes that a round of the target can verify. 0 means no change."""

    @property
    def is_pause(self) -> bool:
        """True if nothing shall grow until further notice."""
        return self.speculation is not None and self.speculation.method.is_off

    def then(self, later: Steering) -> Steering:
        """Returns the change that is equivalent to this one followed by a later one."""
        # `or` is safe: parameters are never falsy, and a number of 0 means no change.
        return Steering(
            later.speculation or self.speculation,
            later.forward_us or self.forward_us,
            later.round_trip_us or self.round_trip_us,
            later.max_num_nodes or self.max_num_nodes,
        )
