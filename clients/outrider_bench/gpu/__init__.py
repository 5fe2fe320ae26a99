"""The GPU suite: our services, other programs with the same weights, and single parts of a forward."""
