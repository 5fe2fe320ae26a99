"""Processes that a benchmark talks to: baselines, and what can only be measured inside a process."""
