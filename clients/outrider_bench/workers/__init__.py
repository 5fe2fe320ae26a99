"""Processes that a benchmark talks to: baselines, and measurements that need the inside of a process."""
