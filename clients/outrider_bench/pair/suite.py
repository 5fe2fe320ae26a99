"""The pair suite: one pair, the family of demo pairs, or a running verifier."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import PairConfig
from outrider_bench.drivers import StackError
from outrider_bench.environment import describe_environment, describe_prompts
from outrider_bench.experiment import DRAFT, DRAFT_UNTRAINED, TARGET
from outrider_bench.pair.report import report_of
from outrider_bench.pair.served import Served
from outrider_bench.pair.study import Pair, PairRefused, Study
from outrider_bench.suite import Log, Suite
from outrider_cli.failures import UNREACHABLE, WRONG_USAGE
from outrider_cli.prompts import PromptError
from outrider_client.channel import NO_SECURITY, ChannelSecurity

FAMILY = (
    Pair("as is", TARGET, DRAFT),
    # Inflated drafts have the small one's output: replaying that one, a hundred settings take seconds, not hours.
    Pair("slower draft", TARGET, "demo/draft-c5", stand_in=DRAFT),
    Pair("larger target", "demo/target-300m", DRAFT),
    Pair("draft of the target's size", TARGET, "demo/draft-100m", stand_in=DRAFT),
    Pair("untrained draft", TARGET, DRAFT_UNTRAINED),
    Pair("target as its own draft", TARGET, TARGET, stand_in="demo/target"),
)
"""Pairs of demo models on which predictions are checked. Their drafts are: fast and right, slow, cheaper relative to
the target, as slow as it, never right, always right."""


class PairSuite(Suite):
    """Predicts the effect of a pair of models, and measures it."""

    name = "pair"
    report_of = staticmethod(report_of)

    def __init__(self, config: PairConfig, security: ChannelSecurity = NO_SECURITY) -> None:
        """`security` is that of the channel to the verifier at `config.address`."""
        super().__init__(config.cores)
        self.config = config
        alone = Pair("the pair", config.target, config.draft, config.dtype, config.draft_dtype)
        self._studies = [Study(pair, config) for pair in (FAMILY if config.is_family else (alone,))]
        self._served = None if config.address is None else Served(config.address, config, security)

    @property
    def has_failures(self) -> bool:
        return super().has_failures or any(one.contender_failures for one in self._all)

    def run(self, out: Path | None, console: Console) -> int:
        """See Suite. Models that are no pair, chats without a chat template, and a verifier that does not answer are
        reported in one line."""
        try:
            return super().run(out, console)
        except (PairRefused, PromptError, StackError) as error:
            print(f"error: {error}", file=sys.stderr)
            return UNREACHABLE if isinstance(error, StackError) else WRONG_USAGE

    @property
    def _all(self) -> Sequence[Study | Served]:
        return self._studies if self._served is None else [self._served]

    async def measure(self, log: Log) -> None:
        if self._served is not None:
            await self._served.run(log)
            return
        for study in self._studies:
            await self.attempt(study.pair.title, partial(study.run, log))

    def found(self) -> dict[str, Any]:
        config = self.config
        claims = [one for study in self._studies for one in study.claims()]
        models = {} if config.is_family else self._all[0].models
        return {
            "environment": describe_environment(models, config.cores),
            "config": {
                "address": config.address,
                "is_family": config.is_family,
                "temperatures": list(config.temperatures),
                "num_speculative_tokens": list(config.num_speculative_tokens),
                **describe_prompts(config.prompts, config.prompt_set),
                "max_tokens": config.max_tokens,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "pairs": [one.to_json() for one in self._all],
            "claims": [claim.to_json() for claim in claims],
        }

    def _leave(self, out: Path | None, console: Console) -> None:
        # Without a model every table would be empty, and the error has the reason.
        if any(one.models for one in self._all):
            super()._leave(out, console)
