"""The suite of generations: every method and baseline next to plain decoding."""
