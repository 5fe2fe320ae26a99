"""A model on any device that torch knows, by its own operators. The other backends fall back on it."""
