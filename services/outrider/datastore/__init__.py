"""The retrieval-datastore: n-gram continuations in Redis."""
