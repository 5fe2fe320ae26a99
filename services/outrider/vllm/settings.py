"""Settings of the proposer: vLLM's `--additional-config '{"outrider": {...}}'`, and OUTRIDER_VLLM_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsConfigDict

from outrider.core.methods import METHODS
from outrider.core.params import RetrievalScope
from outrider.core.speculation import SpeculationParams
from outrider.peers.speculator import MAX_NODES_PER_S
from outrider.security.settings import PeerSecuritySettings, checked_address
from outrider.telemetry.redaction import without_secrets

KEY = "outrider"
"""Key of vLLM's additional config that holds the settings."""
PREFIX = "OUTRIDER_VLLM_"
MAX_TOKENS = 64
"""Most tokens of a chain, as elsewhere."""
MAX_LOOKAHEAD = 16 * MAX_TOKENS


class ProposerSettings(PeerSecuritySettings):
    """Settings of the proposer in vLLM."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    speculator: str = Field(
        "",
        description="Address of the speculator, HOST:PORT; several, with commas between, share the sessions; empty = "
        "none.",
    )
    datastore: str = Field("", description="Address of the datastore, HOST:PORT; empty = none.")
    method: Literal[
        "best-first", "pearl", "saguaro", "card", "double", "retrieval", "spacelike", "speculative", "auto"
    ] = Field("best-first", description="How drafts grow.")
    patience_ms: float = Field(2.0, ge=0, le=20, description="Longest time that a step waits for drafts.")
    lookahead: int = Field(
        32, ge=1, le=MAX_LOOKAHEAD, description="Most tokens beyond the committed ones that a speculator may draft."
    )
    min_path_probability: float = Field(
        0.1, ge=0, lt=1, description="A chain ends where its path is less probable than this."
    )
    retrieval: bool = Field(False, description="Puts what is retrieved after drafted chains, with any method.")
    retrieval_scope: Literal["session", "tenant", "global"] = Field(
        "session", description="Whose texts may be retrieved from the datastore: this text's, the tenant's, all."
    )
    contribute: bool = Field(False, description="Lets others of the scope retrieve what is generated here.")
    corpus: str = Field("", description="Prior corpus to copy; empty = the datastore's default.")
    tenant: str = Field("", description="Owner of all sessions here; empty = the datastore's default.")
    max_draft_nodes_per_s: float = Field(
        MAX_NODES_PER_S, gt=0, description="Most drafted tokens of one session in a second; what is beyond is dropped."
    )
    metrics_listen: str = Field(
        "", description="Address for Prometheus, HOST:PORT, of the process that drafts; empty = none."
    )
    any_vllm: bool = Field(False, description="Runs with a version of vLLM that this one was not tried with.")

    @field_validator("speculator")
    @classmethod
    def _speculators_are_told_apart(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        if value and not all(parts):
            raise ValueError("must be HOST:PORT, or several separated by commas, without an empty one")
        if len(set(parts)) < len(parts):
            raise ValueError("must name each speculator once")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_is_an_address(cls, value: str) -> str:
        return checked_address(value) if value else value

    @model_validator(mode="after")
    def _method_has_its_peers(self) -> Self:
        method = METHODS[self.method]
        if method.needs_draft_model and not self.speculator:
            raise ValueError(f"method: {self.method} drafts with a speculator: give its address as speculator")
        if method.needs_datastore and not self.datastore:
            raise ValueError(f"method: {self.method} looks up a datastore: give its address as datastore")
        if self.contribute and self.scope is RetrievalScope.SESSION:
            raise ValueError("contribute: needs retrieval_scope tenant or global")
        return self

    @property
    def scope(self) -> RetrievalScope:
        """The sessions whose tokens may be retrieved."""
        # In a scope of its own, a session of such a method would have nothing to look up.
        if METHODS[self.method].needs_datastore and "retrieval_scope" not in self.model_fields_set:
            return RetrievalScope.TENANT
        return RetrievalScope[self.retrieval_scope.upper()]

    @property
    def peers(self) -> dict[str, str]:
        """See `PeerSecuritySettings.peers`."""
        return {"--speculator": self.speculator, "--datastore": self.datastore}

    def speculation(self, num_speculative_tokens: int) -> SpeculationParams:
        """Returns the parameters of all sessions: vLLM verifies chains, of at most so many tokens."""
        return SpeculationParams(
            method=METHODS[self.method],
            num_speculative_tokens=num_speculative_tokens,
            lookahead=max(self.lookahead, num_speculative_tokens),
            min_path_probability=self.min_path_probability,
            retrieval=self.retrieval,
            retrieval_scope=self.scope,
            contribute=self.contribute,
        )


def read_settings(additional_config: object) -> ProposerSettings:
    """Reads vLLM's additional config, and the environment for what it does not set.

    Raises:
        ValueError: A key or a value is wrong; a line for each says which, and the rule.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f'--additional-config: "{KEY}" must hold the settings by their names, got {given!r}')
    if unknown := [*_unknown_keys(given), *_unknown_variables(os.environ)]:
        raise ValueError("\n".join(unknown))
    try:
        return ProposerSettings(**given)
    except ValidationError as error:
        raise ValueError("\n".join(_complaint(item) for item in error.errors())) from None


def _unknown_keys(given: Mapping[Any, Any]) -> Iterator[str]:
    known = list(ProposerSettings.model_fields)
    for key in given:
        if key not in known:
            yield f'--additional-config: "{KEY}" has no setting {key!r}: {_advice(str(key), known)}'


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    known = [f"{PREFIX}{name}".upper() for name in ProposerSettings.model_fields]
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            yield f"{name} is no variable of the proposer: {_advice(name, known)}"


def _advice(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _complaint(item: ErrorDetails) -> str:
    # pydantic prefixes the message of a validator's ValueError with these words; shared rules speak of flags.
    rule = item["msg"].removeprefix("Value error, ")
    rule = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), rule)
    if not item["loc"]:
        return f'--additional-config: "{KEY}": {rule}'
    name = str(item["loc"][0])
    field = ProposerSettings.model_fields.get(name)
    got = "" if field is not None and not field.repr else f", got {item.get('input')!r}"
    return without_secrets(f'--additional-config: "{KEY}": {name} (or {PREFIX}{name.upper()}): {rule}{got}')
