"""Counts the bytes of all messages that go by a channel, where they are made into bytes anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from outrider.core.statistics import Traffic


class CountedCalls:
    """A channel whose messages are counted, for stubs."""

    def __init__(self, channel: grpc.aio.Channel, traffics: Sequence[Traffic]) -> None:
        self._channel, self._traffics = channel, traffics

    def __getattr__(self, kind: str) -> Any:
        """unary_unary, unary_stream, stream_unary, stream_stream."""
        make = getattr(self._channel, kind)

        def multi_callable(
            method: str,
            request_serializer: Callable[[Any], bytes],
            response_deserializer: Callable[[bytes], Any],
            **options: Any,
        ) -> Any:
            def serialized(message: Any) -> bytes:
                data = request_serializer(message)
                for traffic in self._traffics:
                    traffic.num_bytes_sent += len(data)
                return data

            def parsed(data: bytes) -> Any:
                for traffic in self._traffics:
                    traffic.num_bytes_received += len(data)
                return response_deserializer(data)

            return make(method, request_serializer=serialized, response_deserializer=parsed, **options)

        return multi_callable
