"""Round trips that take turns: one stack of services, one proxy, whose delay changes between two blocks.

Services learn what a round trip takes, over all their generations. So after each change those methods that live on it
generate a little before anybody is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from outrider_bench.drivers import Driver
from outrider_bench.experiment import Experiment, label_of
from outrider_bench.running import Running, turns_of
from outrider_bench.samples import Block
from outrider_bench.suite import Log
from outrider_cli.links.control import LinkControl

LEARNERS = ("speculative", "best-first", "auto")
"""A wait for every draft, a tree whose shape follows the distance, and a choice among methods."""

Keep = Callable[[str, Block], None]


async def run_round_trips(
    experiments: Sequence[Experiment],
    seed: int,
    cores: tuple[int, ...],
    driver: Driver,
    link: LinkControl,
    log: Log,
    keep: Keep,
) -> dict[str, dict[str, str]]:
    """Runs experiments that differ in their round trip, a repeat of each at a time.

    Args:
        experiments: With the same services; those of one round trip stand together.
        seed: Keys the sampling.
        cores: As in the configuration of the benchmark.
        driver: Of the services.
        link: Of the proxy between verifier and speculator.
        log: Takes a line about what is going on.
        keep: Gets what was measured, with the experiment's name.

    Returns:
        Why contenders failed, by their label, by the experiment's name.
    """
    warm: set[str] = set()
    runs = [_Run(experiment, seed, cores, driver, warm, keep) for experiment in experiments]
    rtts_ms = list(dict.fromkeys(experiment.rtt_ms for experiment in experiments))
    for repeat in range(max(experiment.repeats for experiment in experiments)):
        # None of them is always first.
        first = repeat % len(rtts_ms)
        for rtt_ms in rtts_ms[first:] + rtts_ms[:first]:
            log(f"repeat {repeat + 1}: round trip {rtt_ms:g} ms")
            # Half each way. Here, not by new services: those would differ in more than the distance.
            link.change(delay_ms=rtt_ms / 2)
            for run in runs:
                if run.experiment.rtt_ms == rtt_ms:
                    await run.repeat(repeat)
    return {run.experiment.name: run.running.failures for run in runs}


class _Run:
    """An experiment at its round trip."""

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        cores: tuple[int, ...],
        driver: Driver,
        warm: set[str],
        keep: Keep,
    ) -> None:
        """`warm` has the labels of those who have generated something, at whatever distance; it grows."""
        self.experiment = experiment
        self._config = experiment.config(seed, cores)
        self.running = Running(experiment, self._config, {"stack": driver}, partial(keep, experiment.name))
        self._warm = warm

    async def repeat(self, number: int) -> None:
        """Run one repeat of everything. The distance has just changed to the experiment's."""
        present = await self.running.warm_up(lambda one: one.method in LEARNERS or label_of(one) not in self._warm)
        self._warm.update(map(label_of, present))
        turns = turns_of(self.experiment, self._config, present)
        await self.running.take(turn for turn in turns if turn.repeat == number)
