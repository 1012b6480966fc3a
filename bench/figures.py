"""The table of figures in README.md, made from the files in `bench/results/`: `python -m bench.figures`.

A benchmark without a file there has no line. Beside each line stands the command that made its file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- figures: python -m bench.figures -->", "<!-- end of figures -->"
NO_PEER = "(no peer)"
Rows = list[dict[str, Any]]


class Line(NamedTuple):
    """One line of the table, without its command."""

    what: str
    beside: str
    figure: str


def number(value: float) -> str:
    """Write a number as one reads it: two digits behind the point below ten, above that two that count.

    >>> [number(n) for n in (0.711, 1.973, 11.52, 1930.7, 952_756)]
    ['0.71', '1.97', '12', '1,900', '950,000']
    """
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{round(value, 1 - floor(log10(abs(value)))):,.0f}"


def amount(value: int) -> str:
    """Write a number of messages: millions as such.

    >>> [amount(n) for n in (20_000, 1_000_000, 1_250_000)]
    ['20,000', '1 million', '1.25 million']
    """
    return f"{value:,}" if value < 1_000_000 else f"{value / 1e6:.4g} million"


def several(values: list[float]) -> str:
    """Write numbers that belong together."""
    return " / ".join(number(value) for value in values)


WINDOWS = {
    "tumbling": "tumbling windows of 10 s",
    "keys": "tumbling windows of 10 s",
    "hopping": "hopping windows of 10 s every second",
    "session": "session windows, gap 5 s",
    "median": "median of tumbling windows of 10 s, every message kept",
    "million keys": "tumbling windows of 10 s",
    "2 million": "tumbling windows of 10 s",
}


def windows(rows: Rows, _: str) -> Iterator[Line]:
    """One line per case."""
    for row in rows:
        messages = amount(row["messages per micro-batch"])
        python, floor_ms = row["Spark's Python / ours"], row.get("empty operator ms")
        yield Line(
            f"{WINDOWS[row['case']]}, {amount(row['keys'])} keys, {messages} messages per micro-batch",
            "Spark's own windows" + (", and its stateful Python API" if python else ""),
            f"Spark takes {number(row['Spark / ours'])} times our {row['ours ms']:,.0f} ms per micro-batch"
            + (f", its Python API {number(python)} times" if python else "")
            + (f"; a Python operator that does nothing takes {floor_ms:,.0f} ms" if floor_ms else ""),
        )


def fixed(rows: Rows, _: str) -> Iterator[Line]:
    """One line beside the empty operator, one beside Spark's own."""
    what = f"a micro-batch of 200 messages, {' / '.join(str(row['shards']) for row in rows)} shards"
    above = " / ".join(f"{row['ms per shard above empty']:.0f}" for row in rows)
    first = [(row["first: ours ms"] - row["first: empty ms"]) / 1000 for row in rows]
    yield Line(
        what,
        "a stateful Python operator that does nothing",
        f"{above} ms per shard more; the first micro-batch {several(first)} s more",
    )
    ratios = [row["Spark's own ms"] / row["ours ms"] for row in rows]
    firsts = [row["first: Spark's own ms"] / row["first: ours ms"] for row in rows]
    yield Line(what, "Spark's own windows", f"Spark takes {several(ratios)} times the time, {several(firsts)} at first")


def restore(rows: Rows, _: str) -> Iterator[Line]:
    """One line per kind of state, of those with the most messages, on two shards."""
    texts = {
        "typed": "full-state windows",
        "JSON": "full-state windows from JSON",
        "metadata": "incremental windows, nothing to replay",
        "1 kB each": "full-state windows, messages of 1 kB",
    }
    for kind, text in texts.items():
        found = [row for row in rows if row["what"] == kind and row["shards"] == 2]
        if found:
            row = max(found, key=lambda row: row["rows restored"])
            around = row["s to detect"] + row["s to probe"] + row["s until back"]
            yield Line(
                f"a lost disk restored: {text}, {amount(row['rows restored'])} rows",
                NO_PEER,
                f"{number(row['rows/s'])} rows a second in {row['s to restore']:.1f} s, {around:.1f} s around it; "
                f"at most {row['peak MB per worker']:,.0f} MB per worker",
            )


def growth(rows: Rows, _: str) -> Iterator[Line]:
    """One line for what is kept, one for shards: the most beside the fewest."""
    kept = [row for row in rows if row["messages per micro-batch"] == rows[0]["messages per micro-batch"]]
    few, many = kept[0], kept[-1]
    yield Line(
        f"{amount(many['messages kept'])} messages in retention",
        f"{amount(few['messages kept'])} of them",
        f"{number(many['CPU us per message'] / few['CPU us per message'])} times the CPU per new message, "
        f"{many['peak MB']:,.0f} MB at most instead of {few['peak MB']:,.0f}",
    )
    divided = rows[len(kept) :]
    if divided:
        one, most = divided[0], divided[-1]
        yield Line(
            f"{amount(most['messages per micro-batch'])} messages per micro-batch on {most['shards']} shards",
            f"on {one['shards']}",
            f"{number(most['CPU us per message'] / one['CPU us per message'])} times the CPU per message",
        )


def latency(rows: Rows, _: str) -> Iterator[Line]:
    """One line."""
    ours, sparks = rows
    yield Line(
        "from a window's end to its readable row, 1,000 messages a second from Kafka",
        "Spark's own windows",
        f"p50 {ours['p50 ms']:,.0f} ms against {sparks['p50 ms']:,.0f}, "
        f"p99 {ours['p99 ms']:,.0f} ms against {sparks['p99 ms']:,.0f}",
    )


def kafka(rows: Rows, _: str) -> Iterator[Line]:
    """One line per kind of aggregate."""
    for at in range(0, len(rows), 3):
        ours, *peers = rows[at : at + 3]
        logged = [peer["changelog B/message"] / ours["changelog B/message"] for peer in peers]
        yield Line(
            f"from a Kafka topic to windows, changelog in Kafka: {ours['what']}",
            f"Quix Streams, {' / '.join(peer['processes'] for peer in peers)} processes",
            f"{several([peer['Rewind / this'] for peer in peers])} times its messages a second "
            f"(ours {number(ours['messages/s'])}; the topic read and parsed, thrown away: "
            f"{number(ours['input alone/s'])}, into an empty operator in Python: {number(ours['empty operator/s'])}); "
            f"it logs {several(logged)} times the bytes",
        )


def kafka_restore(rows: Rows, _: str) -> Iterator[Line]:
    """One line."""
    ours, peer = rows
    yield Line(
        f"a lost disk restored from Kafka: every message of JSON kept, {amount(ours['messages'])}",
        "Quix Streams",
        f"{number(peer['Rewind / this'])} times its messages a second (ours {number(ours['messages/s'])}; the "
        f"topic read and parsed, thrown away: {number(ours['input alone/s'])}); "
        f"{ours['s before']:.1f} s before it begins, against {peer['s before']:.1f}",
    )


def join(rows: Rows, title: str) -> Iterator[Line]:
    """One line; its title says how many messages."""
    ours, sparks = rows
    time, state, logged = (
        number(sparks[name] / ours[name]) for name in ("ms per micro-batch", "state bytes", "logged bytes per message")
    )
    yield Line(
        f"{title[0].lower()}{title[1:]}",
        "Spark's own join",
        f"Spark takes {time} times our {ours['ms per micro-batch']:,.0f} ms per micro-batch, {state} times the state, "
        f"{logged} times the logged bytes",
    )


def failover(rows: Rows, _: str) -> Iterator[Line]:
    """One line per case."""
    for row in rows:
        theirs = row["Spark's own s"]
        yield Line(
            f"an executor dies with its disk: {WINDOWS[row['case']]}, {amount(row['keys'])} keys, "
            f"{amount(row['messages before the death'])} messages before, `spark.locality.wait` {row['locality wait']}",
            "Spark's own store",
            f"{number(row['ours / Spark'])} times Spark's {theirs:.1f} s until the micro-batch is committed "
            f"(ours {row['ours min-max']}, Spark's {row['Spark min-max']})",
        )


def snapshots(rows: Rows, _: str) -> Iterator[Line]:
    """One line per kind of window."""
    for at in range(0, len(rows), 4):
        packages, log, *sparks = (row["bytes per event"] for row in rows[at : at + 4])
        yield Line(
            f"bytes to the checkpoint's filesystem: {rows[at]['windows']}",
            "Spark's own store: changelog checkpointing / snapshots only",
            f"it writes {several([spark / packages for spark in sparks])} times what we write with snapshots, "
            f"{several([spark / log for spark in sparks])} times what we write without",
        )


def panes(rows: Rows, _: str) -> Iterator[Line]:
    """One line."""
    one, sixty = rows
    state, log = (number(sixty[name] / one[name]) for name in ("state MB", "changelog MB"))
    yield Line(
        "windows of 60 minutes every minute",
        "tumbling windows of one minute",
        f"{state} times the state, {log} times the changelog, for 60 times the windows",
    )


def changelog_kafka(rows: Rows, _: str) -> Iterator[Line]:
    """One line."""
    row = next(row for row in rows if row["what"] == "restore")
    yield Line(
        "a shard's metadata restored from a changelog in Kafka",
        NO_PEER,
        f"{number(row['records/s'])} records a second, {amount(row['records'])} records",
    )


def stores(rows: Rows, _: str) -> Iterator[Line]:
    """One line."""
    rates = {row["what"]: row["M/s"] for row in rows}
    written = rates["message store: keys, values, stage, fsync, confirm"]
    yield Line(
        "the message store on one core: staged, synced and ingested; read as a table",
        NO_PEER,
        f"{written:.1f} and {rates['message store: read all to a table']:.1f} million messages a second",
    )


FILES: dict[str, Callable[[Rows, str], Iterator[Line]]] = {
    "windows": windows,
    "fixed": fixed,
    "kafka": kafka,
    "kafka-restore": kafka_restore,
    "restore": restore,
    "failover": failover,
    "latency": latency,
    "growth": growth,
    "snapshots": snapshots,
    "join": join,
    "panes": panes,
    "changelog-kafka": changelog_kafka,
    "stores": stores,
}
"""Name of a file -> its lines, in the table's order."""


def table(results: Path = RESULTS, suffix: str = "") -> list[str]:
    """Give the table as lines of Markdown.

    Args:
        results: Where the files are.
        suffix: Behind their names: `-quick` for those of quick runs.
    """
    made = ["| what | beside | figure | command |", "|---|---|---|---|"]
    for name, lines in FILES.items():
        path = results / f"{name}{suffix}.json"
        if path.exists():
            data = json.loads(path.read_text())
            command = data.get("command", f"python -m bench.{name.replace('-', '_')}")
            found = lines(data["rows"], data["title"])
            made += [f"| {line.what} | {line.beside} | {line.figure} | `{command}` |" for line in found]
    return made


def replaced(text: str, lines: list[str]) -> str:
    """Give a text with other lines between the two markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md: {BEGIN} and {END} are not there, one behind the other")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])


def main() -> None:
    """Write the table into README.md."""
    README.write_text(replaced(README.read_text(), table()))


if __name__ == "__main__":
    main()
