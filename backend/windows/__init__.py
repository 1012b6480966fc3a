"""Windows: what they are, and the operators that keep and send them."""
