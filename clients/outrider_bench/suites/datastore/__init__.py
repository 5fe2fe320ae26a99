"""`outrider bench --suite datastore`: the retrieval-datastore, beside its targets and what the machine could do.

suite        what is measured, in which order, and what is left behind
run         how much of everything
data         made-up token streams, and Python's library
generation   beside models: loading a prior, the cost of retrieval in a generation
lookup       over gRPC: latency and throughput, beside gRPC and Redis alone
replicas     two replicas on one Redis
outages      a datastore, or a Redis, that dies or hangs
sessions     what many sessions leave behind
inprocess    local tiers, the ring, replay: in a worker process, outrider_bench.workers.datastore
services     the processes that are measured; echo, the one to compare with
streams      their streams
numbers      numbers beside their targets
report       tables, results.json, report.md; plots, the pictures
"""
