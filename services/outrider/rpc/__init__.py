"""Everything with gRPC: conversion, errors, peers, the server."""
