"""Records the span of a generation, as a child of the span in which the application starts it.

The servers' spans are children of this one. An application that has not imported OpenTelemetry pays only for the check
whether it has. Both clients use it.
"""

from __future__ import annotations

from outrider.telemetry.tracing import (
    CANCELLED,
    NO_SPAN,
    Metadata,
    Span,
    application_tracer,
    operation_attributes,
    peer_attributes,
)
from outrider.v1 import verifier_pb2
from outrider_client.errors import OutriderError


class GenerationTrace:
    """Holds the span of one generation across its calls. It never has a prompt or a text in it."""

    def __init__(self, request: verifier_pb2.GenerateRequest) -> None:
        self._span: Span = NO_SPAN
        if (tracer := application_tracer()) is None:
            return
        attributes = operation_attributes(request.prompt.WhichOneof("input") == "chat")
        # None: below what the application is doing. Conventions add the model to the name, which is not known yet.
        self._span = tracer.begin(attributes["gen_ai.operation.name"], "client", attributes, None)

    @property
    def metadata(self) -> Metadata:
        """Returns the metadata that go with every call."""
        return self._span.metadata

    def begin_call(self, address: str) -> None:
        """Records the replica of a call that begins."""
        if self._span.is_recorded:
            self._span.set_attributes(peer_attributes(address))

    def on_message(self, response: verifier_pb2.GenerateResponse) -> None:
        """Records a message."""
        if not self._span.is_recorded:
            return
        match response.WhichOneof("event"):
            case "started":
                started = response.started
                self._span.set_attributes(
                    {
                        "gen_ai.request.model": started.model.model_id,
                        "gen_ai.response.model": started.model.model_id,
                        "gen_ai.usage.input_tokens": started.num_prompt_tokens,
                        "outrider.session_id": started.session_id,
                    }
                )
            case "finished":
                finished = response.finished
                reason = verifier_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
                self._span.set_attributes(
                    {
                        "gen_ai.response.finish_reasons": [reason],
                        "gen_ai.usage.output_tokens": finished.num_output_tokens,
                    }
                )
                self._span.end()

    def go_on(self, error: OutriderError) -> None:
        """Records a call that failed and will be followed by another one."""
        self._span.add_event("outrider.call_failed", {"rpc.response.status_code": error.code.name})

    def fail(self, error: OutriderError) -> None:
        """Ends the span with an error: there will be no other call."""
        self._span.end(error.code.name, is_error=True)

    def cancel(self) -> None:
        """Ends the span of a generation that the application cancels. Nothing happens to one that has ended."""
        self._span.end(CANCELLED)

    def __del__(self) -> None:
        # An application may drop a generation before its end; a span that is never ended is never sent.
        self.cancel()
