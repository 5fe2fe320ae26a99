"""The suite of generations: every method and baseline beside plain decoding."""
