"""The client SDK: an asyncio and a blocking client of a verifier, and an edge inside the application.

>>> from outrider_client import BlockingClient
>>> with BlockingClient("127.0.0.1:50051") as client:                           # doctest: +SKIP
...     print(client.complete("def add(", temperature=0, max_tokens=32).text)
"""

from outrider.core.params import Source
from outrider_client.blocking import BlockingClient, BlockingGeneration
from outrider_client.chats import ChatMessage
from outrider_client.client import Client, Generation
from outrider_client.errors import OutriderError
from outrider_client.generation import Chunk, FinishReason, Result
from outrider_client.requests import GenerateOptions, Prompt

__all__ = [
    "BlockingClient",
    "BlockingGeneration",
    "ChatMessage",
    "Chunk",
    "Client",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "OutriderError",
    "Prompt",
    "Result",
    "Source",
]
