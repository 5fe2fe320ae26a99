"""The controller of `auto`: strategies, their records, and the choice among them."""
