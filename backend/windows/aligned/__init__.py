"""Tumbling and hopping windows over event time, and what combines messages for them."""
