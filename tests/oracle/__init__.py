"""Independent oracles: plain loops that share no code with the product."""
