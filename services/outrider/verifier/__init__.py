"""The target-verifier: generates the target's own text, a chain at a time."""
