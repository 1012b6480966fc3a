"""Real flights, a disaster, a restore, a proof: `python -m recovery.demo`."""
