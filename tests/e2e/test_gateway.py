"""A gateway as a process in front of the whole stack: every method's text over HTTP, and a load generator's view."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest
import torch

from outrider.models.loading import build_hf_model
from outrider_cli.prompts import load_prompts
from tests.support.gateways import events_of
from tests.support.variants import VARIANTS, options_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

PROMPTS = [prompt.text for prompt in load_prompts("demo")][:4]
NUM_TOKENS = 40
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


# Stop strings.


@dataclass(frozen=True)
class Whole:
    """A text without stop strings."""

    text: str
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    """Where the text of each token ends."""


@dataclass(frozen=True)
class Streamed:
    """The result of a streamed text."""

    pieces: tuple[tuple[str, int], ...]
    """The text up to each event, and the tokens that had come by then."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | None
    num_output: int
    """Number of output tokens according to the usage."""


async def streamed(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Streamed:
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True}
    response = await http.post(path, json={**body, **more})
    assert response.status_code == 200, response.text
    *events, usage, done = events_of(response.text)
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    text, pieces, token_ids = "", [], []
    for choice in choices[:-1]:
        text += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        token_ids += choice.get("token_ids") or []
        pieces.append((text, len(token_ids)))
    last = choices[-1]
    text += last["text"] if path == COMPLETIONS else ""
    counted = json.loads(usage)["usage"]["completion_tokens"]
    return Streamed(tuple(pieces), text, tuple(token_ids), last["finish_reason"], last["stop_reason"], counted)


async def whole(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Whole:
    off = {"speculation": {"method": "off"}, "speculation_report": ["sources"], "ignore_eos": True}
    (choice,) = (await http.post(path, json={**body, **off})).json()["choices"]
    told = choice["speculation"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    return Whole(text, tuple(told["token_ids"]), tuple(told["text_ends"]))


def random_stops(random: Random, text: str) -> list[str]:
    """Strings that occur in the text, nearly occur, or do not."""
    stops = []
    for _ in range(random.randint(1, 4)):
        begin = random.randrange(len(text))
        piece = text[begin : begin + random.randint(1, 9)]
        kind = random.random()
        # The second kind differs in its last character; the third is too long to occur.
        if kind < 0.3:
            # Begins before the piece and ends after it, so the piece should stop the text first.
            stops.append(text[max(0, begin - 2) : begin + len(piece) + 1])
        stops.append(piece if kind < 0.5 else piece[:-1] + "\u0001" if kind < 0.8 else piece + text[:40] + "~")
    return stops


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the stop string that ends first; of two with the same end, the longer one."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


def decided(text: str, stops: Sequence[str]) -> str:
    """The longest beginning of a text that cannot become a part of a stop string."""
    for begin in range(len(text)):
        if any(len(text) - begin < len(stop) and stop.startswith(text[begin:]) for stop in stops):
            return text[:begin]
    return text


async def test_stop_strings_end_streams_where_they_begin_whatever_the_method(
    http: httpx.AsyncClient, full: bool
) -> None:
    random = Random(1)
    num_cases, num_stopped, num_held = (1000 if full else 48), 0, 0
    bodies: dict[tuple[str, int], tuple[dict[str, Any], Whole]] = {}
    for path in (COMPLETIONS, CHAT):
        for number in range(8):
            prompt = PROMPTS[number % 4]
            asked = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
            body = {**asked, "max_tokens": NUM_TOKENS, "seed": number, "temperature": (0.0, 1.0)[number // 4]}
            bodies[path, number] = body, await whole(http, path, body)
    limit = asyncio.Semaphore(6)

    async def one(number: int) -> tuple[bool, bool]:
        path = (COMPLETIONS, CHAT)[number % 2]
        body, plain = bodies[path, random.randrange(8)]
        # The ends of tokens exclude a character that is unfinished at the end.
        text, variant = plain.text[: plain.ends[-1]], VARIANTS[number % len(VARIANTS)]
        stops, includes = random_stops(random, text), random.random() < 0.3
        asked = {"stop": stops, "include_stop_str_in_output": includes, "speculation": options_of(variant)}
        async with limit:
            told = await streamed(http, path, {**body, **asked})
        case = (variant, body, stops, includes, told, plain)
        found = first_stop(text, stops)
        num_held = 0
        if found is None:
            assert (told.text, told.token_ids, told.finish_reason) == (plain.text, plain.token_ids, "length"), case
            assert told.stop_reason is None, case
        else:
            begin, end = found
            num_tokens = 1 + next(index for index, each in enumerate(plain.ends) if each >= end)
            assert told.text == text[: end if includes else begin], case
            assert told.token_ids == plain.token_ids[:num_tokens], case
            assert (told.finish_reason, told.stop_reason) == ("stop", text[begin:end]), case
        assert told.num_output == len(told.token_ids), case
        for sent, num_tokens in told.pieces:
            if num_tokens == len(told.token_ids):
                break  # the end decides about all text that was held back
            known = text[: plain.ends[num_tokens - 1]] if num_tokens else ""
            assert sent == decided(known, stops), case
            num_held += sent != known
        return found is not None, num_held > 0

    for stopped, held in await asyncio.gather(*(one(number) for number in range(num_cases))):
        num_stopped += stopped
        num_held += held
    assert num_cases / 4 < num_stopped < num_cases
    assert num_held > num_cases / 8


# Log-probabilities.


async def test_log_probabilities_over_http_are_those_of_transformers_whatever_the_method(
    http: httpx.AsyncClient,
) -> None:
    model, tokenizer = build_hf_model("demo/target", "float32")
    prompt = tokenizer(PROMPTS[2])["input_ids"]
    limit = asyncio.Semaphore(4)

    async def ask(variant: str) -> dict[str, Any]:
        body = {
            "prompt": PROMPTS[2], "max_tokens": 24, "seed": 5, "temperature": 0.8, "logprobs": 3, "ignore_eos": True,
            "presence_penalty": 0.5, "top_k": 40, "return_token_ids": True, "speculation": options_of(variant),
        }  # fmt: skip
        async with limit:
            response = await http.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0])

    choices = await asyncio.gather(*(ask(variant) for variant in VARIANTS))
    with torch.inference_mode():
        text = [*prompt, *choices[0]["token_ids"]]
        rows = model(torch.tensor([text])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    expected = [float(row[token_id]) for row, token_id in zip(rows, choices[0]["token_ids"], strict=True)]
    for variant, choice in zip(VARIANTS, choices, strict=True):
        assert choice["token_ids"] == choices[0]["token_ids"], variant
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4), variant
        for row, told in zip(rows, choice["logprobs"]["top_logprobs"], strict=True):
            assert sorted(told.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4), variant


# A load generator.


@dataclass
class Served:
    """What a load generator knows of one request."""

    text: str = ""
    num_output: int = 0
    num_prompt: int = 0
    num_pieces: int = 0


async def load_request(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> Served:
    """Sends and reads as `vllm bench serve` does with its backend `openai`, whose requests have these fields, null
    included. It strips white space around what a read brings, and skips comments."""
    payload = {
        "model": "demo/target", "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": max_tokens, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    decoder, buffer, served = codecs.getincrementaldecoder("utf-8")(), "", Served()
    async with http.stream("POST", COMPLETIONS, json=payload, headers={"x-request-id": "bench-1"}) as response:
        assert response.status_code == 200
        async for data in response.aiter_raw():
            buffer += decoder.decode(data)
            *messages, buffer = buffer.split("\n\n")
            for message in messages:
                event = message.strip().removeprefix("data: ")
                if message.startswith(":") or event == "[DONE]":
                    continue
                told = json.loads(event)
                if choices := told.get("choices"):
                    served.text += choices[0].get("text") or ""
                    served.num_pieces += 1
                elif usage := told.get("usage"):
                    served.num_output, served.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
    assert buffer == ""
    return served


async def test_a_load_generator_of_vllm_reads_texts_usage_and_acceptance(http: httpx.AsyncClient) -> None:
    async def counted() -> dict[str, float]:
        text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = await counted()
    served = await asyncio.gather(*(load_request(http, PROMPTS[number % 4], 24) for number in range(12)))
    after = await counted()
    for number, each in enumerate(served):
        assert (each.text, each.num_output) == (served[number % 4].text, 24)
        assert each.num_prompt > 0
        assert 1 <= each.num_pieces <= 25
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    drafts, accepted = grown["vllm:spec_decode_num_drafts_total"], grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["vllm:spec_decode_num_draft_tokens_total"] >= accepted > drafts / 2
    by_place = {name: value for name, value in grown.items() if 'position="' in name}
    assert sum(by_place.values()) == accepted
    assert max(by_place.values()) <= drafts
