"""The tables of figures in README.md, docs/figures.md and docs/sinks.md: `python -m bench.figures`.

They are made from the files in `bench/results/`. A benchmark without a file there has no line.
Beside each line stands the command that made its file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "figures.md"
SINKS_PAGE = PAGE.with_name("sinks.md")
README = PAGE.parent.with_name("README.md")
BEGIN, END = "<!-- figures: python -m bench.figures -->", "<!-- end of figures -->"
AS_OURS = "its checkpoint's files written by Rewind's class"
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
    yield Line(what, "a stateful Python operator that does nothing", f"{above} ms per shard more")
    ratios = [row["Spark's own ms"] / row["ours ms"] for row in rows]
    firsts = [row["first: Spark's own ms"] / row["first: ours ms"] for row in rows]
    yield Line(what, "Spark's own windows", f"Spark takes {several(ratios)} times the time, {several(firsts)} at first")
    ours, sparks = (
        " / ".join(f"{row[f'until committed: {who} ms'] / 1000:.1f}" for row in rows) for who in ("ours", "Spark's own")
    )
    first = "from before a query's start to the end of its first micro-batch, in a JVM that has run others"
    yield Line(f"{first}, {what.rpartition(', ')[2]}", "Spark's own windows", f"{ours} s against {sparks} s")


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


def beside(rows: Rows, _: str) -> Iterator[Line]:
    """One line per number of messages: shards that queue beside the query that stops."""
    for queues, stops in zip(rows[::2], rows[1::2], strict=True):
        new, results, share = (f"{queues[name]:.1f}" for name in ("s to new messages", "s to results", "share of rate"))
        yield Line(
            f"one of two shards' disks taken under the query, {amount(queues['messages kept'])} messages kept",
            "the same, the query stops",
            f"{new} s until the lost shard takes new messages, {results} s until its results come, at {share} of the"
            f" rate meanwhile; stopped: {stops['s to results']:.1f} s",
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
    """The default, back to back, and both to Kafka; once more with the peer's checkpoint written as ours."""
    default, ours, to_kafka, files, updates, *as_ours = rows
    update_mode = "Spark's own windows, update mode, last row"
    what = "from a window's end to its readable row, 1,000 messages a second from Kafka"
    for mine, who, beside, peer in (
        (default, "", "Spark's own windows", files),
        (ours, ', `trigger="0 seconds"`', "Spark's own windows", files),
        (to_kafka, ', `trigger="0 seconds"`, into Kafka', update_mode, updates),
        *((to_kafka, ', `trigger="0 seconds"`, into Kafka', f"{update_mode}; {AS_OURS}", peer) for peer in as_ours),
    ):
        yield Line(
            f"{what}{who}",
            beside,
            f"p50 {mine['p50 ms']:,.0f} ms against {peer['p50 ms']:,.0f}, "
            f"p99 {mine['p99 ms']:,.0f} ms against {peer['p99 ms']:,.0f}",
        )


def kafka(rows: Rows, _: str) -> Iterator[Line]:
    """Two lines per kind of aggregate: beside Spark's own windows, and beside Quix Streams."""
    for what in dict.fromkeys(row["what"] for row in rows):
        ours, *others = (row for row in rows if row["what"] == what)
        peers = [peer for peer in others if peer["who"] == "Quix Streams"]
        case = f"from a Kafka topic to windows, changelog in Kafka: {what}"
        for sparks in (peer for peer in others if peer not in peers):
            ratio = f"{number(sparks['Rewind / this'])} times its messages a second"
            yield Line(case, sparks["who"], f"{ratio} ({number(sparks['messages/s'])})")
        logged = [peer["changelog B/message"] / ours["changelog B/message"] for peer in peers]
        yield Line(
            case,
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
        f"Quix Streams, 1 process, {amount(peer['messages'])}",
        f"{number(peer['Rewind / this'])} times its messages a second (ours {number(ours['messages/s'])} on both "
        f"cores, one run each); {ours['s before']:.1f} s before it begins, against {peer['s before']:.1f}",
    )


def join(rows: Rows, title: str) -> Iterator[Line]:
    """One line per peer; its title says how many messages."""
    ours, *peers = rows
    names = ("ms per micro-batch", "state bytes", "logged bytes per message")
    for sparks in peers:
        time, state, logged = (number(sparks[name] / ours[name]) for name in names)
        yield Line(
            f"{title[0].lower()}{title[1:]}",
            f"{sparks['join'].replace('own', 'own join', 1)}",
            f"Spark takes {time} times our {ours['ms per micro-batch']:,.0f} ms per micro-batch, {state} times the "
            f"state, {logged} times the logged bytes",
        )


def failover(rows: Rows, _: str) -> Iterator[Line]:
    """One line per case."""
    for row in rows:
        theirs = row["Spark's own s"]
        standby = ", and a standby has copies" if row.get("who") == "ours, standby=1" else ""
        above = (
            f"; above an undisturbed micro-batch: ours {row['ours above s']:.1f} s ({row['ours above min-max']}), "
            f"Spark's {row['Spark above s']:.1f} s ({row['Spark above min-max']})"
            if "who" in row  # files of before have no such columns
            else ""
        )
        yield Line(
            f"an executor dies with its disk{standby}: {WINDOWS[row['case']]}, {amount(row['keys'])} keys, "
            f"{amount(row['messages before the death'])} messages before, `spark.locality.wait` {row['locality wait']}",
            "Spark's own store",
            f"{number(row['ours / Spark'])} times Spark's {theirs:.1f} s until the micro-batch is committed "
            f"(ours {row['ours min-max']}, Spark's {row['Spark min-max']}){above}",
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


def sinks(rows: Rows, _: str) -> Iterator[Line]:
    """One line for all; each sink's is in docs/sinks.md."""
    nothing, *others = rows
    most, least = (choose(others, key=lambda row: row["rows/s"]) for choose in (max, min))
    yield Line(
        f"a micro-batch of {amount(nothing['rows per micro-batch'])} results through a sink",
        "the same rows, made and thrown away",
        f"{number(most['rows/s'])} rows a second ({most['sink']}) to {number(least['rows/s'])} ({least['sink']}); "
        f"thrown away: {number(nothing['rows/s'])}",
    )


FILES: dict[str, Callable[[Rows, str], Iterator[Line]]] = {
    "windows": windows,
    "fixed": fixed,
    "kafka": kafka,
    "kafka-restore": kafka_restore,
    "restore": restore,
    "beside": beside,
    "failover": failover,
    "latency": latency,
    "growth": growth,
    "snapshots": snapshots,
    "join": join,
    "panes": panes,
    "sinks": sinks,
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


def table_of_sinks(results: Path = RESULTS) -> list[str]:
    """Return what goes through each sink, as lines of Markdown; nothing where it was not measured."""
    path = results / "sinks.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    made = [f"| {row['sink']} | {number(row['rows/s'])} | {row['ms per micro-batch']:,.0f} |" for row in rows]
    size = amount(rows[0]["rows per micro-batch"])
    return [f"| through | rows a second | ms per micro-batch of {size} rows |", "|---|---|---|", *made]


class Beside(NamedTuple):
    """What Spark's own takes for what ours does: of one unit, in the same run."""

    what: str
    unit: str
    ours: list[float]
    sparks: list[float]


def windows_beside(rows: Rows) -> Iterator[Beside]:
    """One line per case."""
    for row in rows:
        messages = amount(row["messages per micro-batch"])
        what = f"{WINDOWS[row['case']]}, {amount(row['keys'])} keys, {messages} messages per micro-batch"
        yield Beside(what, "ms", [row["ours ms"]], [row["Spark's own ms"]])


def fixed_beside(rows: Rows) -> Iterator[Beside]:
    """Two lines, for all numbers of shards."""
    shards = f"{' / '.join(str(row['shards']) for row in rows)} shards"
    for name, what in (("", "a micro-batch of 200 messages"), ("until committed: ", "`start()` to the first commit")):
        ours, sparks = ([row[f"{name}{who} ms"] for row in rows] for who in ("ours", "Spark's own"))
        yield Beside(f"{what}, {shards}", "ms", ours, sparks)


def kafka_beside(rows: Rows) -> Iterator[Beside]:
    """One line per kind of aggregate."""
    for what in dict.fromkeys(row["what"] for row in rows):
        rates = {row["who"]: row["messages/s"] for row in rows if row["what"] == what}
        if SPARKS in rates:
            yield Beside(f"JSON from Kafka to windows: {what}", "messages/s", [rates["Rewind"]], [rates[SPARKS]])


def latency_beside(rows: Rows) -> Iterator[Beside]:
    """A line into files, and those into Kafka."""
    of = {row["who"]: [row["p50 ms"], row["p99 ms"]] for row in rows}
    what = "a window's end to its readable row, p50 / p99"
    files = of["Spark's own, append to files"]
    yield Beside(f"{what}, into files", "ms", of["ours, trigger 0 s"], files)
    ours, update_mode = of["ours to Kafka, trigger 0 s"], f"{what}, into Kafka, beside update mode"
    yield Beside(update_mode, "ms", ours, of["Spark's own, update to Kafka"])
    if "the same, with our checkpoint files" in of:
        yield Beside(f"{update_mode}, {AS_OURS}", "ms", ours, of["the same, with our checkpoint files"])


def join_beside(rows: Rows) -> Iterator[Beside]:
    """One line per state format of Spark's."""
    ours, *peers = rows
    for peer in peers:
        _, _, state_format = peer["join"].partition(", ")
        what = "an interval join" + (f", beside {state_format}" if state_format else "")
        yield Beside(what, "ms", [ours["ms per micro-batch"]], [peer["ms per micro-batch"]])


def failover_beside(rows: Rows) -> Iterator[Beside]:
    """One line per case, without a standby."""
    for row in rows:
        if row.get("who", "ours") == "ours":
            case, wait = WINDOWS[row["case"]], row["locality wait"]
            what = f"an executor dies with its disk: {case}, until committed, `spark.locality.wait` {wait}"
            yield Beside(what, "s", [row["ours s"]], [row["Spark's own s"]])


SPARKS = "Spark's own windows"
BESIDE: dict[str, Callable[[Rows], Iterator[Beside]]] = {
    "windows": windows_beside,
    "kafka": kafka_beside,
    "latency": latency_beside,
    "join": join_beside,
    "fixed": fixed_beside,
    "failover": failover_beside,
}


def table_beside(results: Path = RESULTS) -> list[str]:
    """Return what Spark's own takes beside ours, as lines of Markdown; without files only the head."""
    made = ["| what | Rewind | Spark's own | times as fast |", "|---|---|---|---|"]
    for name, lines in BESIDE.items():
        path = results / f"{name}.json"
        for line in lines(json.loads(path.read_text())["rows"]) if path.exists() else ():
            slower = (line.ours, line.sparks) if line.unit.endswith("/s") else (line.sparks, line.ours)
            times = several([above / below for above, below in zip(*slower, strict=True)])
            made.append(
                f"| {line.what} | {written(line.ours, line.unit)} | {written(line.sparks, line.unit)} | {times} |"
            )
    return made


def written(values: list[float], unit: str) -> str:
    """Write numbers of a unit.

    >>> written([204.4, 1_355.9], "ms"), written([1.045], "s"), written([669_120.1], "messages/s")
    ('204 / 1,356 ms', '1.0 s', '670,000 messages/s')
    """
    digits = {"ms": ",.0f", "s": ".1f"}
    texts = [f"{value:{digits[unit]}}" if unit in digits else number(value) for value in values]
    return f"{' / '.join(texts)} {unit}"


def replaced(text: str, lines: list[str]) -> str:
    """Give a text with other lines between the two markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"README.md, docs/figures.md, docs/sinks.md: {BEGIN} and {END} are not there, one behind the other"
        )
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])


PAGES: dict[Path, Callable[[], list[str]]] = {README: table_beside, PAGE: table, SINKS_PAGE: table_of_sinks}
"""Page -> its table."""


def main() -> None:
    """Write the tables into README.md, docs/figures.md and docs/sinks.md."""
    for page, lines in PAGES.items():
        page.write_text(replaced(page.read_text(), lines()))


if __name__ == "__main__":
    main()
