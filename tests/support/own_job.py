"""A user's job for the command: `module:function` gives a pipeline that is fully said and not started."""

from __future__ import annotations

import os
from typing import Any

from backend import archive, count, hopping, median, policies, stream, sum_

ARCHIVE = "OWN_JOB_ARCHIVE"
VALUE = "customer string, at timestamp, cents long"
ROWS = 400
"""Per micro-batch."""


def sales(spark: Any) -> Any:
    """Give sales per customer in hopping windows, over an archive of typed values, in two shards."""
    source = archive(os.environ[ARCHIVE], value=VALUE, format="typed", max_offsets_per_batch=ROWS)
    windowed = stream(source, event_time="at", key="customer").window(
        hopping("20 seconds", "10 seconds"), retention="1 minute", max_ahead=None, policies=policies(late="off")
    )
    return windowed.aggregate(n=count(), total=sum_("cents"), typical=median("cents")).options(shards=2)
