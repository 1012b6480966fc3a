"""The data of the drill's own job: departures that it makes itself, so that a drill needs nothing but the snapshot.

They have the form of the demo's flights (`recovery.drill.flights`) and their troubles: three source partitions, event
times out of order by up to a day, values that do not parse. The same numbers of days gives the same departures.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from recovery.drill.flights import AIRPORTS, YEAR_START_MS

PER_DAY = 900
"""Departures a day, of all airports: as many as left New York in 2013."""
CANCELLED = 0.025
"""Share of departures without a delay: their values do not parse."""
_DAY_MINUTES = 24 * 60
_SEED = 2013


def made_flights(days: int) -> pa.Table:
    """Make departures in the form of `recovery.drill.flights.read_flights`, as far as `messages` reads it.

    Args:
        days: From 2013-01-01 UTC on, at least 1.

    Returns:
        `origin, dest, carrier, tailnum, dep_delay` texts, `flight, scheduled_ms` int64; `PER_DAY` rows a day, in order
        of the scheduled departure.
    """
    chance = np.random.default_rng(_SEED)
    rows = PER_DAY * days
    minutes = np.sort(chance.integers(0, days * _DAY_MINUTES, rows))
    delays = np.minimum(chance.exponential(25, rows) - 10, 21 * 60).astype(np.int64)
    delays[chance.random(rows) < 0.002] = 20 * 60  # now and then one leaves almost a day late
    texts = delays.astype(str).astype(object)
    texts[chance.random(rows) < CANCELLED] = "NA"
    flights = chance.integers(1, 10_000, rows)
    return pa.table(
        {
            "origin": pa.array(np.array(AIRPORTS, object)[chance.integers(0, len(AIRPORTS), rows)], pa.string()),
            "dest": pa.array(["LAX"] * rows),
            "carrier": pa.array(["UA"] * rows),
            "tailnum": pa.array([f"N{number}" for number in flights]),
            "dep_delay": pa.array(texts, pa.string()),
            "flight": pa.array(flights, pa.int64()),
            "scheduled_ms": pa.array(YEAR_START_MS + minutes * 60_000, pa.int64()),
        }
    )
