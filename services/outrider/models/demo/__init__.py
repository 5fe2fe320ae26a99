"""The demo pair: a small target and its draft, trained on Python's own standard library."""
