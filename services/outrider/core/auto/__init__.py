"""The controller behind `auto`: strategies, what is known of them, and the choice among them."""
