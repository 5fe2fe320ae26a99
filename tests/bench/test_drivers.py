"""How services are started for a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import stack_config
from outrider_cli.local.stack import LocalStack


@pytest.mark.parametrize(("cores", "pinned"), [((), [set(), set()]), ((5, 7), [{5}, {7}]), ((5, 5), [{5}, {5}])])
def test_services_are_pinned_to_the_cores_that_were_chosen_and_without_any_not_at_all(
    monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], pinned: list[set[int]]
) -> None:
    spawned: dict[str, set[int]] = {}

    class Spawned:
        name, address = "service", "127.0.0.1:1"

        def wait_listening(self) -> None: ...
        def wait_serving(self, **_: object) -> None: ...

    def spawn(
        _: LocalStack, name: str, flags: tuple[str, ...], on: set[int], *_more: object, **_named: object
    ) -> Spawned:
        assert "--cpu" not in flags, "one place says it"
        spawned[name] = on
        return Spawned()

    monkeypatch.setattr(LocalStack, "_spawn", spawn)
    with LocalStack(replace(stack_config(BenchConfig(cores=cores), 0.0), datastore=False)):
        pass
    assert [spawned["verifier"], spawned["speculator"]] == pinned
