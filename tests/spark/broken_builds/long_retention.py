"""The drill's own job with windows that stay: what a restore leaves out of them is missing at the end, too."""

from __future__ import annotations

import os
from typing import Any

from backend import archive, count, stream, tumbling
from recovery.drill.job import DATA, OFFSETS


def departures(spark: Any) -> Any:
    data = archive(
        os.environ[DATA],
        value="origin string, scheduled timestamp",
        max_offsets_per_batch=int(os.environ[OFFSETS]),
    )
    return (
        stream(data, key="origin")  # by the records' own times, which are in order: an old window gets no more
        .window(tumbling("1 hour"), retention="30 days", max_ahead=None)
        .aggregate(flights=count())
        .options(route="partition")
    )
