"""A speculator with a fault, as a process: `python -m tests.vllm.stub_speculator slow|lying`. Prints its address."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from outrider.v1 import speculator_pb2 as pb
from outrider.v1 import types_pb2
from tests.support.scripted_speculator import ScriptedSpeculator, serving

SLEEP_S = 1.0


class Slow(ScriptedSpeculator):
    """Sleeps before each answer."""

    async def _session(self, requests: AsyncIterator[pb.SessionRequest], context: Any) -> AsyncIterator[Any]:
        async for response in super()._session(requests, context):
            await asyncio.sleep(SLEEP_S)
            yield response


class Lying(ScriptedSpeculator):
    """Is certain of tokens that do not follow, and of some that do not exist."""

    async def _session(self, requests: AsyncIterator[pb.SessionRequest], context: Any) -> AsyncIterator[Any]:
        length = node_id = 0
        async for request in requests:
            match request.WhichOneof("event"):
                case "open":
                    length = len(request.open.committed_token_ids)
                    yield pb.SessionResponse(opened=pb.SpeculateOpened(forward_us=100))
                case "commit":
                    length = request.commit.base_len + len(request.commit.token_ids)
            draft = types_pb2.Draft(
                base_len=length,
                first_node_id=node_id,
                parent_offsets=[0, 1, 1, 1],
                token_ids=[2047, 2046, 2047, 1 << 30],
                costs=[0, 0, 0, 0],
            )
            node_id += 4
            yield pb.SessionResponse(draft=pb.SpeculatorDraft(draft=draft))


async def main(kind: str) -> None:
    async with serving({"slow": Slow, "lying": Lying}[kind]()) as address:
        print("listening", address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
