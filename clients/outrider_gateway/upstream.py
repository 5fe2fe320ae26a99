"""The verifier as seen from the gateway: clients for it, its model, the bytes of its tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence

import grpc
import structlog
from starlette.datastructures import Headers

from outrider.security.tokens import token_from
from outrider.v1 import verifier_pb2
from outrider_client.client import Client
from outrider_gateway.errors import ApiError
from outrider_gateway.settings import GatewaySettings
from outrider_gateway.tools.calls import ToolCallFormat

log = structlog.get_logger(__name__)

INFO_TTL_S = 10.0
"""Age at which the cached information about the model is refreshed, in seconds."""
INFO_TIMEOUT_S = 5.0
MAX_ADMITTED = 4096
"""Most callers whose admission by the verifier is cached."""
MAX_TOKEN_BYTES = 1 << 18
"""Most tokens whose bytes are kept: all of a large vocabulary."""


def caller_token(headers: Headers) -> str:
    """Returns the token of a caller: OpenAI's bearer or Anthropic's key; empty if there is none. Raises ApiError."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    token = token.strip()
    if scheme and scheme.lower() != "bearer":
        raise ApiError(401, f"authorization must be Bearer TOKEN, got {scheme}", code="invalid_api_key")
    # Some clients send an empty bearer if no key is set.
    token = token or headers.get("x-api-key", "").strip()
    if token:
        try:
            token_from([token.encode("latin-1")])
        except ValueError:
            raise ApiError(401, "the token must be one word in ASCII", code="invalid_api_key") from None
    return token


class Upstream:
    """Holds the connections to the verifier. Lives on the event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises UnusableFile."""
        self._addresses, self._insecure = settings.upstreams, settings.peer_insecure
        self._security = settings.peer_security()
        self._credentials = self._credentials_now()
        self._clients = [self._open()]
        """All clients that were opened; new calls use the last one. The credential files of the others have changed."""
        self._more_names = settings.served_model_names
        self._tool_call_format = ToolCallFormat(settings.tool_call_format)
        self._info: verifier_pb2.GetInfoResponse | None = None
        self._info_at = 0.0
        self._admitted_until: dict[bytes, float] = {}
        """Times until which the admission of a token, by its hash, is cached."""
        self._token_bytes: dict[int, bytes] = {}
        self.started_at = int(time.time())
        """The time when the gateway was started, in seconds since 1970: "created" of its models."""

    def for_caller(self, token: str) -> Client:
        """Returns a client whose calls have a caller's token; empty means none."""
        return self._client().for_caller(token)

    def own(self, token: str = "") -> Client:
        """Returns a client for the gateway's own calls, with the caller's token if the gateway has none."""
        ours = dict(self._security.metadata()).get("authorization", "").removeprefix("Bearer ")
        return self._client().for_caller(ours or token)

    async def info(self, token: str) -> verifier_pb2.GetInfoResponse:
        """Asks the verifier for its description, with a caller's token: any admitted caller may know it. Raises
        OutriderError."""
        return await self._ask(self.for_caller(token))

    async def admit(self, token: str) -> None:
        """Raises OutriderError for a caller that the verifier does not admit. The answer may be some seconds old."""
        now, name = time.monotonic(), hashlib.sha256(token.encode()).digest()
        if now < self._admitted_until.get(name, 0.0):
            return
        await self.info(token)
        if len(self._admitted_until) >= MAX_ADMITTED:
            self._admitted_until.clear()
        self._admitted_until[name] = now + INFO_TTL_S

    async def _ask(self, client: Client) -> verifier_pb2.GetInfoResponse:
        info = await client.info(timeout_s=INFO_TIMEOUT_S)
        if self._info is None or info.model.model_id != self._info.model.model_id:
            self._token_bytes.clear()
            log.info("gateway.model", model=info.model.model_id, tool_call_format=self._format_of(info).value)
        self._info, self._info_at = info, time.monotonic()
        return info

    async def model(self, token: str = "") -> verifier_pb2.GetInfoResponse:
        """Returns the verifier's description, which may be some seconds old. Raises OutriderError."""
        if self._info is None or time.monotonic() - self._info_at > INFO_TTL_S:
            return await self._ask(self.own(token))
        return self._info

    async def tool_call_format(self, token: str) -> ToolCallFormat:
        """Returns how the model writes calls of tools, according to the settings or its chat template. Raises
        OutriderError."""
        return self._format_of(await self.model(token))

    def _format_of(self, info: verifier_pb2.GetInfoResponse) -> ToolCallFormat:
        is_said = self._tool_call_format is not ToolCallFormat.AUTO
        return self._tool_call_format if is_said else ToolCallFormat.of_template(info.chat_template)

    async def model_names(self, token: str = "") -> list[str]:
        """Returns the names of the model, its own first. Raises OutriderError."""
        info = await self.model(token)
        return list(dict.fromkeys([info.model.model_id, *self._more_names]))

    async def served_model(self, asked: str | None, token: str) -> str:
        """Returns the name of the model for an answer. Raises ApiError for a model that is not served;
        OutriderError."""
        names = await self.model_names(token)
        # A path, or a name on the hub, may be shortened to its last part.
        if asked is not None and asked not in (*names, names[0].rstrip("/").rpartition("/")[2]):
            # The names may be cached from a call with the gateway's own token: a caller that the verifier does not
            # admit must not see them.
            await self.admit(token)
            served = ", ".join(names)
            message = f"model {asked!r} is not served here: {served} is"
            raise ApiError(404, message, code="model_not_found", param="model")
        return names[0] if asked is None else asked

    async def token_bytes(self, token_ids: Iterable[int]) -> dict[int, bytes]:
        """Returns the bytes of tokens by their ids. Raises OutriderError."""
        known, asked = self._token_bytes, set(token_ids)
        if missing := sorted(asked - known.keys()):
            if len(known) + len(missing) > MAX_TOKEN_BYTES:
                known.clear()
                missing = sorted(asked)
            found: Sequence[bytes] = await self.own().token_bytes(missing)
            known.update(zip(missing, found, strict=True))
        return {token_id: known[token_id] for token_id in asked}

    async def is_serving(self) -> bool:
        """Returns True if the verifier, or a replica of it, serves. Raises OutriderError."""
        return await self.own().health(timeout_s=INFO_TIMEOUT_S)

    async def close(self) -> None:
        """Closes the connections; running generations are cancelled."""
        for client in self._clients:
            await client.close()

    def _client(self) -> Client:
        if (credentials := self._credentials_now()) is not self._credentials:
            self._credentials = credentials
            self._clients.append(self._open())
        return self._clients[-1]

    def _credentials_now(self) -> grpc.ChannelCredentials | None:
        return self._security.credentials(",".join(self._addresses))

    def _open(self) -> Client:
        return Client(
            self._addresses, credentials=self._credentials, insecure=self._credentials is None and self._insecure
        )
