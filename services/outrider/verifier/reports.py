"""Reports of a session beside its tokens: its text where that may have a stop string, log-probabilities, rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from outrider.core.params import Method
from outrider.core.reports import RoundReport, TokenLogprobs, VerifiedTree
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import RoundTime
from outrider.core.tree import Node
from outrider.models.logprobs import token_logprobs
from outrider.models.sampling import Logits
from outrider.verifier.stop_text import StopText


class SessionReports:
    """Completes the verdicts of one session by what its request asks for. Owned by the engine's thread."""

    def __init__(self, spec: SessionSpec, stop_text: StopText | None) -> None:
        """`stop_text` decodes the output where the generation has stop strings; None where it has none."""
        self._params, self._stop_text = spec.report, stop_text
        self._prompt_token_ids = spec.prompt_token_ids
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_first = True
        self._tree: VerifiedTree | None = None

    @property
    def wants_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are still to be told."""
        return self._params.prompt_logprobs is not None and len(self._prompt_logprobs) < len(self._prompt_token_ids) - 1

    def add_prompt(self, logits: Logits, position: int) -> None:
        """Takes in the logits behind tokens of the prompt, from a position on. Resumed tokens may stand behind it."""
        # After a preemption the prompt is read again: what is known already is passed over.
        num_known = max(0, len(self._prompt_logprobs) - position)
        token_ids = self._prompt_token_ids[position + num_known + 1 : position + 1 + len(logits)]
        of_tokens = logits[num_known : num_known + len(token_ids)]
        num_top, mode = self._params.prompt_logprobs or 0, self._params.logprobs_mode.raw
        self._prompt_logprobs += token_logprobs(of_tokens, token_ids, num_top, mode)

    def watch(self, nodes: Sequence[Node]) -> None:
        """Takes in what a round verifies, before its verdict takes the parents from the nodes."""
        self._tree = VerifiedTree.of(nodes) if self._params.trees else None

    def complete(
        self, verdict: Verdict, method: Method, nodes: Sequence[Node], times: RoundTime, num_forward_rows: int
    ) -> Verdict:
        """Returns a verdict with what is told beside its tokens.

        Args:
            verdict: That of the round.
            method: The way in which the round was drafted.
            nodes: Drafted tokens that it verified.
            times: Its times.
            num_forward_rows: Rows of its forward, those of other sessions included.
        """
        if self._stop_text is not None:
            last_text = self._stop_text.finish() if verdict.finish_reason is not None else ""
            text, stop_string = self._stop_text.take_text(), self._stop_text.found
            ends = self._stop_text.take_text_ends()
            verdict = replace(verdict, text=text, last_text=last_text, text_ends=ends, stop_string=stop_string)
        if self._is_first and self._prompt_logprobs:
            verdict = replace(verdict, prompt_logprobs=tuple(self._prompt_logprobs))
        self._is_first = False
        if not (self._params.rounds or self._params.trees):
            return verdict
        drafted = Counter(node.source for node in nodes)
        report = RoundReport(method, drafted, verdict.num_accepted, num_forward_rows, times, self._tree)
        return replace(verdict, report=report)
