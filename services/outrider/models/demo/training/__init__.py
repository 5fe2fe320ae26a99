"""How the demo pair is trained: corpus, recipe, evaluation, model card."""
