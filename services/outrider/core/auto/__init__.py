"""The controller behind `Method.AUTO`: strategies, what is known of them, and the choice among them."""
