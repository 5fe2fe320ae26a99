"""The statistics as Prometheus reads them, and the service as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation
from outrider.datastore.metrics import DURATION_BOUNDS_S, ReplicaStatistics, read_metrics
from outrider.datastore.types import Health
from outrider.telemetry.metrics import HistogramMetric
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.version import __version__
from tests.support.datastores import look_up, query, record


def test_metrics_are_the_statistics_under_other_names():
    statistics = ReplicaStatistics()
    found = [Continuation(3, Source.PRIOR, (0,), (1,), (1,)), Continuation(2, Source.PRIOR, (0,), (1,), (1,)), NOTHING]
    statistics.add_lookup(found, is_local=False, duration_s=0.0004)
    statistics.add_lookup([NOTHING], is_local=True, duration_s=9.0)
    statistics.add_accepted([(Source.RING, 5)])
    statistics.health = Health("redis 7.2", 1000, 2000, 3)
    metrics = {metric.name.removeprefix("outrider_datastore_"): metric for metric in read_metrics(statistics, [], 7)}
    durations = metrics.pop("lookup_duration_seconds")
    values = {
        name: {",".join(labels): value for labels, value in metric.values.items()} for name, metric in metrics.items()
    }
    nothing = dict.fromkeys(("prior", "dynamic", "shared", "rejected", "ring"), 0)
    assert values == {
        "outrider_build_info": {f"datastore,{__version__}": 1},
        "lookups_total": {"": 4},
        "local_lookups_total": {"": 1},
        "hits_total": {**nothing, "prior": 2},
        "matched_tokens_total": {**nothing, "prior": 5},
        "accepted_tokens_total": {**nothing, "ring": 5},
        "redis_errors_total": {"": 7},
        "evicted_keys_total": {"": 3},
        "memory_bytes": {"": 1000},
        "memory_limit_bytes": {"": 2000},
        "redis_up": {"": 1},
        "rings": {"": 0},
        "ring_tokens": {"": 0},
        "ring_indexed_tokens": {"": 0},
    }
    assert isinstance(durations, HistogramMetric)
    observed = durations.observed
    assert (observed.counts[DURATION_BOUNDS_S.index(0.0005)], observed.counts[-1], sum(observed.counts)) == (1, 1, 2)
    assert observed.total == pytest.approx(9.0004)


@pytest.mark.slow
async def test_the_service_prints_where_its_metrics_are_and_ends_on_sigterm(redis_url, scope):
    command = [sys.executable, "-m", "outrider.datastore", "--listen", "127.0.0.1:0", "--redis-url", redis_url]
    # On a loaded machine, Redis may answer slowly, and a process may take time to end its calls.
    command += ["--metrics-listen", "127.0.0.1:0", "--drain-timeout-s", "60", "--lookup-timeout-ms", "5000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # noqa: ASYNC220 - it is to run beside us
        try:
            address, metrics = (process.stdout.readline().split() for _ in range(2))
            assert (address[0], metrics[0]) == ("listening", "metrics")
            async with grpc.aio.insecure_channel(address[1]) as channel:
                stub = pb_grpc.DatastoreServiceStub(channel)
                named = pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id="s")
                await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3]))
                await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1, 2)]))
                with urllib.request.urlopen(f"http://{metrics[1]}/metrics", timeout=5) as response:  # noqa: ASYNC210
                    text = response.read().decode()
                found = {s.name: s for f in text_string_to_metric_families(text) for s in f.samples if s.value}
                assert found["outrider_datastore_hits_total"].labels == {"tier": "dynamic"}
                assert found["outrider_datastore_lookup_duration_seconds_count"].value == 1
                # An endless stream does not hold the process up: it is ended in order.
                watch = stub.Watch(pb.WatchRequest(scope=pb.Scope(tokenizer_hash=scope.tokenizer_hash)))
                await watch.read()
                process.send_signal(signal.SIGTERM)
                assert await watch.code() == grpc.StatusCode.OK
            # Long before the process would cut off running calls.
            assert process.wait(30) == 0
        finally:
            process.kill()
