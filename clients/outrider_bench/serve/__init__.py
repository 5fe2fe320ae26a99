"""A gateway under load, by GuideLLM."""
