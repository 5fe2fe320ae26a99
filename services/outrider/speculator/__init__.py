"""The draft-speculator: guesses ahead of the target."""
