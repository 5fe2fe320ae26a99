"""Outrider: distributed speculative decoding. The map with the life of a request is in services/README.md.

v1/          generated code of protos/outrider/v1
core/        pure logic on token ids: draft tree, session, acceptance, noise; drafting/, auto/, retrieval/
models/      everything with tensors: loading, the packed forward, sampling, the engine's thread; hub, demo/
wire/        messages to values and back: conversion, handshake, errors, channels
telemetry/   metrics, traces, logs
security/    callers, credentials, certificates, the gate, quotas
peers/       connections to other services: speculator, datastore
server/      a service as a process: settings, run, health, streams, exports
verifier/    the target-verifier service
speculator/  the draft-speculator service
datastore/   the retrieval-datastore service
edge/        a speculator beside the application that dials the verifier

Imports run one way: core <- models; core <- telemetry <- wire <- security <- {peers, server} <- services. Services
never import each other, but for the edge, which is a speculator.
"""
