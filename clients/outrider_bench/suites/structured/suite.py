"""The suite of structured output: experiments that share one server, all of them in turns."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np

from outrider_bench.bootstrap import with_intervals
from outrider_bench.config import BenchConfig, StructuredConfig
from outrider_bench.drivers import ClientDriver, describe_server, running_services, stack_config
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import OFF, Contender, Experiment
from outrider_bench.result import Measurement
from outrider_bench.running import WARM_UP_PROMPT, WARM_UP_SEED, Running, turns_of
from outrider_bench.samples import Block, Request
from outrider_bench.suite import ExperimentSuite, Log
from outrider_bench.suites.structured.beginnings import Beginnings
from outrider_bench.suites.structured.claims import (
    StructuredEvidence,
    agreements,
    claims_of,
    different_texts,
    evidence_of,
    mask_costs,
    partings,
)
from outrider_bench.suites.structured.experiments import FORCING, GENERAL, experiments_of, sizes_of, structures_of
from outrider_bench.suites.structured.report import report_of
from outrider_client.channel import SecurityOptions
from outrider_client.client import Client


class StructuredSuite(ExperimentSuite):
    """Measures what structured output costs and brings, on texts that are known to be right."""

    name, report_name = "structured", "report.md"
    report_of = staticmethod(report_of)
    essential = frozenset({"server"})

    def __init__(self, config: StructuredConfig, security: SecurityOptions | None = None) -> None:
        """`security` is that of the connection to the verifier at `config.address`."""
        self.config = config
        self.sizes = sizes_of(config)
        super().__init__(config.cores, config.seed, experiments_of(config, self.sizes))
        self.beginnings = Beginnings(self.sizes)
        self._security = security or SecurityOptions()
        self._checks: list[str] = []

    async def measure(self, log: Log) -> None:
        await self.attempt("server", partial(self._measure_all, log))

    def found(self) -> dict[str, Any]:
        config = self.config
        evidence = evidence_of(self._blocks, self.experiments, self.beginnings)
        return {
            "environment": describe_environment(self.models, config.cores),
            "config": {
                "address": config.address,
                "parts": list(config.parts),
                "methods": list(config.methods),
                "target": config.address or self.sizes.target,
                "num_texts": self.sizes.num_texts,
                "text_prompt_tokens": self.beginnings.num_prompt_tokens,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "checks": self._checks,
            "experiments": self.experiments_to_json(),
            "masks": [cost.to_json() for cost in mask_costs(evidence)],
            "claims": [claim.to_json() for claim in self._claims(evidence)],
        }

    def _claims(self, evidence: StructuredEvidence) -> list[Measurement]:
        """Return the claims, with intervals where more than one prompt was measured."""

        def drawn(random: np.random.Generator) -> list[Measurement]:
            return claims_of(self.config.parts, evidence.resampled(random))

        claims = claims_of(self.config.parts, evidence)
        return with_intervals(claims, drawn, self.config.seed) if evidence.measured.can_vary else claims

    async def _measure_all(self, log: Log) -> None:
        async with AsyncExitStack() as stack:
            client = await self._connected(stack, log)
            for experiment in self.experiments:
                log(f"{experiment.title}: {experiment.num_generations} generations")
                await self.attempt(experiment.title, partial(self._run, experiment, client))
            if "texts" in self.config.parts:
                log("several texts of a prompt")
                num_turns = self.config.repeats * self.sizes.rounds_per_repeat
                await self.attempt("texts", partial(self.beginnings.run, client, self.config.seed, num_turns))
            await self.attempt("checks", partial(self._check, client))

    async def _connected(self, stack: AsyncExitStack, log: Log) -> Client:
        address, security = self.config.address, self._security
        if address is None:
            log("starting the services")
            models = BenchConfig(target=self.sizes.target, cores=self.config.cores)
            services = await stack.enter_async_context(running_services(stack_config(models, 0.0)))
            address, security = services.stack.address, SecurityOptions()
        client = await stack.enter_async_context(Client(address, **security))
        self.models = describe_server(await client.info())
        return client

    async def _run(self, experiment: Experiment, client: Client) -> None:
        driver = ClientDriver(client, structures_of(experiment))
        config = self.config_of(experiment)
        running = Running(experiment, config, {"stack": driver}, partial(self._keep_block, experiment.name))
        present = await running.warm_up()
        for contender in present:
            await self._follow_each(experiment, contender, driver)
        for prompt in experiment.prompts:
            # A server may keep what it has read: whoever came first would read the prompt for all the others.
            await client.complete(prompt.text, max_tokens=1, method=OFF)
        await running.take(turns_of(experiment, config, present))
        self.contender_failures[experiment.name] = running.failures

    def _keep_block(self, name: str, block: Block) -> None:
        self.keep(name, [block])

    async def _follow_each(self, experiment: Experiment, contender: Contender, driver: ClientDriver) -> None:
        """Have every structure compiled, and followed once, behind a prompt that is not measured."""
        structures = structures_of(experiment).values()
        for structure in {json.dumps(each): each for each in structures}.values():
            request = Request(WARM_UP_PROMPT, experiment.temperatures[0], WARM_UP_SEED, experiment.max_tokens)
            await driver.generate(request, {**contender.options, "structured_outputs": structure})

    async def _check(self, client: Client) -> None:
        """Make sure that texts are what they must be: what is measured of wrong ones says nothing."""
        evidence = evidence_of(self._blocks, self.experiments, self.beginnings)
        is_exact = not self.models["target"]["exact_off_reason"]
        self.failures |= partings(evidence, is_exact=is_exact)
        self._checks += agreements(evidence)
        for name in (FORCING, GENERAL):
            texts = [await client.detokenize(token_ids) for token_ids in different_texts(self._blocks.get(name, ()))]
            wrong = [text for text in texts if not is_json(text)]
            if wrong:
                self.failures[name] = f"{len(wrong)} of {len(texts)} texts are not JSON, like {wrong[0][:80]!r}"
            elif texts:
                self._checks.append(f"{name}: all of {len(texts)} different texts are JSON documents")


def is_json(text: str) -> bool:
    """Return True if a text is a JSON document."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
