"""The application: its routes, and what wraps each of them: errors, counts, a line of the log."""

from __future__ import annotations

import asyncio
import difflib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.export import ServiceMetrics
from outrider.telemetry.tracing import CANCELLED, traced_request
from outrider.version import __version__
from outrider_client.errors import OutriderError
from outrider_gateway.bodies import ClientGone
from outrider_gateway.dialects.chat import chat_completions
from outrider_gateway.dialects.completions import completions
from outrider_gateway.dialects.messages import count_tokens, messages
from outrider_gateway.dialects.responses import count_input_tokens, responses
from outrider_gateway.errors import ApiError, from_upstream
from outrider_gateway.exchange import ABORT, REQUEST_ID, Exchange, Gateway
from outrider_gateway.lab import lab_action, lab_state
from outrider_gateway.models import detokenize, model, models, tokenize
from outrider_gateway.openapi import openapi
from outrider_gateway.page.load import load
from outrider_gateway.page.routes import file, index
from outrider_gateway.sites import check_site
from outrider_gateway.streams import answer

log = structlog.get_logger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
MESSAGES = "/v1/messages"
"""The path of Anthropic's API, whose errors have a shape of their own."""
ANTHROPIC_REQUEST_ID = "request-id"
"""Header with which Anthropic's clients identify a request."""
ROUTE = "outrider.route"
"""Key of a request's scope: the pattern of its route, for the counts."""


def make_app(gateway: Gateway, metrics: ServiceMetrics) -> ASGIApp:
    """Returns the application of a gateway. `metrics`: source of /metrics."""

    async def tell_metrics(exchange: Exchange) -> None:
        if gateway.settings.peer_token_file:
            # If the verifier requires tokens, only its callers may see these counts.
            await exchange.upstream.admit(exchange.token)
        # In a thread: it also reads files of the process.
        body = await asyncio.to_thread(metrics.text)
        fields = [
            (b"content-type", b"text/plain; version=1.0.0; charset=utf-8"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": fields})
        await exchange.send({"type": "http.response.body", "body": body, "more_body": False})

    post: dict[str, Handler] = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/responses": responses,
        "/v1/responses/input_tokens": count_input_tokens,
        MESSAGES: messages,
        f"{MESSAGES}/count_tokens": count_tokens,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    get: dict[str, Handler] = {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/health": _health,
        "/live": _ping,
        "/ping": _ping,
        "/version": _version,
        "/openapi.json": openapi,
    }
    if not gateway.settings.metrics_listen:
        get["/metrics"] = tell_metrics
    if gateway.settings.page:
        get |= {"/": index, "/page/load": load, "/page/lab": lab_state, "/page/{path:path}": file}
        post["/page/lab"] = lab_action
    routes = [
        Route(path, _Endpoint(gateway, path, handler), methods=[method])
        for method, handlers in (("POST", post), ("GET", get))
        for path, handler in handlers.items()
    ]
    known = [route.path for route in routes]
    # Without slash redirects: a POST would lose its body.
    front = _Front(Router(routes, redirect_slashes=False, default=_unknown(known)), gateway)
    if not gateway.settings.allowed_origins:
        return front
    # Outermost: pages of those origins may read errors, too.
    return CORSMiddleware(
        front, gateway.settings.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=[REQUEST_ID, ANTHROPIC_REQUEST_ID],
    )  # fmt: skip


class _Endpoint:
    """Serves one route."""

    def __init__(self, gateway: Gateway, path: str, handler: Handler) -> None:
        self._gateway, self._path, self._handler = gateway, path, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE].append(self._path)
        with self._gateway.intake.hold() as holding:
            await self._serve(Exchange(self._gateway, scope, receive, send, holding))

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.scope["method"] != "POST":
            await self._handler(exchange)
            return
        with traced_request(f"POST {self._path}", exchange.headers.get("traceparent", "")) as span:
            try:
                await self._handler(exchange)
            except ApiError as error:
                # A caller's mistake is not an error of the server.
                span.end(str(error.status), is_error=error.status >= 500)
                raise
            except ClientGone:
                span.end(CANCELLED)
                raise


class _Front:
    """Answers failed requests with errors, and counts and logs all answers. Wraps everything."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._metrics, self._settings = app, gateway.metrics, gateway.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0
        scope[ROUTE] = []
        # With this key the router raises an error for a wrong method, instead of answering with plain text.
        scope["app"] = self

        async def told(message: Message) -> None:
            nonlocal status
            if not status:
                status = message["status"]
                message["headers"] = _with_request_id(scope["path"], message["headers"])
                route = scope[ROUTE][0] if scope[ROUTE] else "unknown"
                self._metrics.answered(route, status, time.perf_counter() - began)
            await send(message)

        try:
            check_site(Headers(scope=scope), self._settings)
            await self._app(scope, receive, told)
        except ClientGone:
            self._metrics.num_disconnects += 1
            log.debug("gateway.client_gone", path=scope["path"], seconds=round(time.perf_counter() - began, 3))
            # The client may still be connected without reading.
            if abort := scope.get(ABORT):
                abort()
            return
        except Exception as error:
            # Drop the traceback: its frames hold the parsed body, and this frame holds the error.
            failed = _api_error(error).with_traceback(None)
            if failed.status >= 500:
                log.warning("gateway.error", path=scope["path"], status=failed.status, reason=failed.message)
            if not status:
                if _is_anthropics(scope["path"]):
                    name = uuid.uuid4().hex
                    envelope = failed.anthropic_envelope(name)
                    await answer(told, failed.status, envelope, {**failed.headers, REQUEST_ID: name})
                else:
                    await answer(told, failed.status, failed.body, failed.headers)
        log.debug(
            "gateway.answered", method=scope["method"], path=scope["path"], status=status,
            seconds=round(time.perf_counter() - began, 3),
        )  # fmt: skip


def _is_anthropics(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def _with_request_id(path: str, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an answer, adding those that name its request if they are missing."""
    own = REQUEST_ID.encode()
    found = next((value for name, value in headers if name == own), None)
    value = found or uuid.uuid4().hex.encode()
    missing = [] if found else [(own, value)]
    if _is_anthropics(path):
        missing.append((ANTHROPIC_REQUEST_ID.encode(), value))
    return [*headers, *missing]


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutriderError):
        return from_upstream(error)
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("allow", (error.headers or {}).get("Allow", ""))
        headers = {"allow": allowed} if allowed else {}
        return ApiError(
            error.status_code, f"this path takes {allowed} only", code="method_not_allowed", headers=headers
        )
    log.error("gateway.failed", exc_info=error)
    return ApiError(500, "the gateway has failed: its log says how", code="internal_error")


def _unknown(known: list[str]) -> ASGIApp:
    async def unknown(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        near = difflib.get_close_matches(path.rstrip("/"), known, 1, 0.6)
        near = [f"/v1{path.rstrip('/')}"] if f"/v1{path.rstrip('/')}" in known else near
        hint = f": did you mean {near[0]}?" if near else ""
        raise ApiError(404, f"there is no {path} here{hint}", code="not_found")

    return unknown


async def _health(exchange: Exchange) -> None:
    if exchange.gateway.is_draining.is_set() or not await exchange.upstream.is_serving():
        raise ApiError(503, "no verifier serves: it loads or drains", code="unavailable", headers={"retry-after": "1"})
    await exchange.answer({"status": "ok"})


async def _ping(exchange: Exchange) -> None:
    await exchange.answer({"status": "ok"})


async def _version(exchange: Exchange) -> None:
    await exchange.answer({"version": __version__})
