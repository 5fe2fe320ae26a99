"""Reports of a session besides its tokens: its text if that may have a stop string, log-probabilities, rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outrider.core.reports import RoundReport, TokenLogprobs, VerifiedTree
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import Method
from outrider.core.statistics import DraftTime, RoundTime
from outrider.core.tree import Draft, Node
from outrider.models.logprobs import token_logprobs
from outrider.models.sampling import Logits
from outrider.verifier.stop_text import StopText


class RoundDrafts:
    """Measures the drafts that come between two rounds, whether or not the target waits for them."""

    def __init__(self) -> None:
        self._committed_at: dict[int, float] = {}
        """Times of the commits that no draft has answered, by the number of committed tokens."""
        self._latency_s = 0.0
        self._forward_us = self._retrieval_us = 0

    def commit(self, base_len: int, now: float) -> None:
        """Records that the first base_len tokens are committed from now on."""
        self._committed_at[base_len] = now

    def add(self, draft: Draft, arrived_at: float) -> None:
        """Takes in a draft. The first draft with the length of a commit answers it, and all commits before it."""
        committed_at = self._committed_at.get(draft.base_len)
        self._committed_at = {each: at for each, at in self._committed_at.items() if each > draft.base_len}
        if committed_at is not None:
            self._latency_s = arrived_at - committed_at
        self._forward_us += draft.forward_us
        self._retrieval_us += draft.retrieval_us

    def forget_commits(self) -> None:
        """Forgets the commits that a lost stream has not answered."""
        self._committed_at.clear()

    def take(self) -> DraftTime:
        """Returns the latency of the latest answer since the last call, and the work for all drafts since then."""
        time = DraftTime(self._latency_s * 1e3, self._forward_us / 1e3, self._retrieval_us / 1e3)
        self._latency_s, self._forward_us, self._retrieval_us = 0.0, 0, 0
        return time


class SessionReports:
    """Completes the verdicts of one session with what its request asks for. Owned by the engine's thread."""

    def __init__(self, spec: SessionSpec, stop_text: StopText | None) -> None:
        """`stop_text` decodes the output if the generation has stop strings; None if it has none."""
        self._params, self._stop_text = spec.report, stop_text
        self._prompt_token_ids = spec.prompt_token_ids
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_first = True
        self._tree: VerifiedTree | None = None
        self.drafts = RoundDrafts() if spec.report.rounds or spec.report.trees else None
        """Measures the drafts of each round. None if the request asks for no rounds."""

    @property
    def wants_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are still to be told."""
        return self._params.prompt_logprobs is not None and len(self._prompt_logprobs) < len(self._prompt_token_ids) - 1

    def add_prompt(self, logits: Logits, position: int) -> None:
        """Takes in the logits after tokens of the prompt, from a position on. Resumed tokens may follow the prompt."""
        # After a preemption the prompt is read again: what is known already is skipped.
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
        """Returns a verdict with the reports besides its tokens.

        Args:
            verdict: The verdict of the round.
            method: The method by which the round was drafted.
            nodes: Drafted tokens that it verified.
            times: The times of the round.
            num_forward_rows: Rows of its forward, those of other sessions included.
        """
        if self._stop_text is not None:
            last_text = self._stop_text.finish() if verdict.finish_reason is not None else ""
            text, stop_string = self._stop_text.take_text(), self._stop_text.found
            ends = self._stop_text.take_text_ends()
            verdict = verdict._replace(text=text, last_text=last_text, text_ends=ends, stop_string=stop_string)
        if self._is_first and self._prompt_logprobs:
            verdict = verdict._replace(prompt_logprobs=tuple(self._prompt_logprobs))
        self._is_first = False
        if self.drafts is None:
            return verdict
        drafted = Counter(node.source for node in nodes)
        report = RoundReport(
            method, drafted, verdict.num_accepted, num_forward_rows, times, self.drafts.take(), self._tree
        )
        return verdict._replace(report=report)
