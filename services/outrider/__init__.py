"""Outrider: distributed speculative decoding.

v1/          generated code of protos/outrider/v1
core/        pure logic on token ids: draft tree, growth policies, session, n-grams, noise, statistics
models/      everything with tensors: packed runner, sampler, loading, the demo pair
rpc/         everything with gRPC: conversion, errors, peers, server
verifier/    the target-verifier service
speculator/  the draft-speculator service
datastore/   the retrieval-datastore service

Imports run one way: core <- models, core <- rpc <- services. Services never import each other.
"""
