"""Calls of tools: how models write them, how a text is split into them, and the grammar that holds a text to them."""
