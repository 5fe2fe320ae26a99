"""Chat templates of several kinds, on the demo models' tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.models.loading import LoadedModel
from tests.support.services import target_model

CHATML = """
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool.function | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.name is defined %}{{- ' name=' + message.name }}{%- endif %}
    {%- if message.tool_call_id is defined %}{{- ' answers=' + message.tool_call_id }}{%- endif %}
    {{- '\\n' }}
    {%- if message.content is defined %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<call id=' ~ call.id ~ ' type=' + call.type + '>' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- ' ' + name + '=' + value | tojson }}
        {%- endfor %}
        {{- '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
"""Knows tools, their calls and answers, every role, and a variable `enable_thinking`."""

HERMES = """
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Shows the model tools as they are, and has calls written as Hermes does."""

ALTERNATING = """
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}{{- raise_exception('no role ' + message.role) }}{%- endif %}
    {{- '[' + message.role + ']' + message.content }}
{%- endfor %}
"""
"""Takes two roles, and knows no tools."""

TRIMMING = "{%- for message in messages %}{{- '[' + message.content | trim + ']' }}{%- endfor %}"
"""Strips white space from the ends of messages."""

UPPERCASE = "{%- for message in messages %}{{- message.content | upper }}{%- endfor %}"
"""Changes the text of messages, so none of them can be continued."""


def with_template(template: str | None) -> Any:
    """The demo models' tokenizer with another template."""
    tokenizer = copy.deepcopy(target_model().tokenizer)  # all tests share the model's own tokenizer
    tokenizer.chat_template = template
    return tokenizer


def model_with_template(template: str) -> LoadedModel:
    """The demo target with another template."""
    return replace(target_model(), tokenizer=with_template(template))


def with_tokens(added: Mapping[str, bool], template: str | None = None) -> Any:
    """The demo models' tokenizer, whose last tokens are replaced by these; the values say if a token is special."""
    description = json.loads(target_model().tokenizer.backend_tokenizer.to_str())
    vocab = description["model"]["vocab"]
    kept = len(vocab) - len(added)
    description["model"]["vocab"] = {token: token_id for token, token_id in vocab.items() if token_id < kept}
    description["model"]["merges"] = [pair for pair in description["model"]["merges"] if vocab["".join(pair)] < kept]
    backend = Tokenizer.from_str(json.dumps(description))
    for text, is_special in added.items():
        backend.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template
    )
