"""Connections to other services: the speculator, the datastore, and what they share."""
