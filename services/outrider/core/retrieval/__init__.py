"""Retrieval in process: n-gram tiers, priors, the ring and its index, and what a session does with them."""
