"""Trains the demo pair: corpus, recipe, evaluation, model card."""
