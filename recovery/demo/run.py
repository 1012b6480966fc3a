"""The demo: show its table, and run it from the command line."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recovery.demo.chapters import DEFAULT_OFFSETS, Demo, Failed, Observed
from recovery.demo.proof import Comparison, Proof
from recovery.inspect.screen import plain


def show(console: Console, proof: Proof, observed: Observed, seconds: float) -> None:
    """Print the table and what is not equal."""
    beside = f"{observed.queued} micro-batches queued, {observed.others:,} rows of others meanwhile"
    rows = [
        ("messages", f"{proof.messages:,}"),
        ("windows (airport and hour)", f"{proof.windows.total:,}"),
        ("late, counted in a later revision", f"{proof.late:,}"),
        ("errors: out of retention", f"{proof.too_late:,}"),
        ("errors: malformed (cancelled flights)", f"{proof.malformed:,}"),
        ("micro-batches", f"{observed.micro_batches}"),
        ("a disk taken under the query", beside),
        ("  restored beside it", _restored(observed.beside, observed.beside_s)),
        ("the job killed, all disks lost", f"{observed.restores} shards restored"),
        ("  restored", _restored(observed.replayed, observed.restore_s)),
        ("rows emitted twice", f"{proof.duplicates:,}"),
        ("last revision", _verdict(proof.windows, "windows")),
        ("first emission", _verdict(proof.full, "windows")),
        ("errors output", _verdict(proof.errors, "rows")),
        ("whole demo", f"{seconds:.0f} s"),
    ]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    if console.is_terminal:
        console.print(table)
    else:
        for name, value in rows:
            console.print(plain(f"{name:40} {value}"), soft_wrap=True)
    for part in (proof.windows, proof.full, proof.errors):
        for sample in part.samples:
            console.print(plain(f"not equal: {sample}"), soft_wrap=True)


def _restored(records: int, seconds: float) -> str:
    return f"{records:,} messages in {seconds:.2f} s"


def _verdict(part: Comparison, noun: str) -> str:
    return f"{part.equal:,} of {part.total:,} {noun} equal"


def at_least_one(text: str) -> int:
    """Return a number given as an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from 1")
    return number


def main() -> int:
    """Run the demo; the exit code is 0 only if everything is equal."""
    parser = argparse.ArgumentParser(prog="python -m recovery.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output directory, emptied first")
    parser.add_argument("--days", type=at_least_one, default=None, help="only the first days of 2013")
    parser.add_argument(
        "--offsets", type=at_least_one, default=DEFAULT_OFFSETS, help="offsets per airport and micro-batch"
    )
    parser.add_argument("--break-restore", action="store_true", help="leave out one replayed message: it must fail")
    parser.add_argument("--kafka", action="store_true", help="through a Kafka broker: topic and changelog")
    options = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        return _run(_demo(options, console, stack), console, break_restore=options.break_restore)


def _demo(options: argparse.Namespace, console: Console, stack: ExitStack) -> Demo:
    """Make the story; a broker that it needs ends with the stack."""
    out = options.out.absolute()
    if not options.kafka:
        return Demo(out, console, days=options.days, offsets=options.offsets)
    from recovery.demo.kafka import KafkaDemo
    from recovery.testing.broker import open_broker

    began = time.monotonic()
    broker, close = open_broker()
    stack.callback(close)
    console.print(f"broker: {broker.settings.servers} in {time.monotonic() - began:.1f} s", highlight=False)
    return KafkaDemo(out, console, days=options.days, offsets=options.offsets, settings=broker.settings)


def _run(demo: Demo, console: Console, *, break_restore: bool) -> int:
    began = time.monotonic()
    try:
        demo.prepare()
    except ValueError as error:
        console.print(plain(str(error)), soft_wrap=True)
        return 2
    try:
        demo.disaster()
        demo.restart(break_restore=break_restore)
        proof = demo.prove()
    except Failed as failure:
        console.print(plain(f"FAILED: {failure}"), soft_wrap=True)
        console.print(plain(f"logs: {demo.out}/*.log"), soft_wrap=True)
        return 1
    show(console, proof, demo.observed, time.monotonic() - began)
    if not proof.holds:
        console.print("FAILED: the output differs from the recomputation", highlight=False)
        return 1
    if demo.observed.replayed == 0 or demo.observed.beside == 0 or demo.observed.queued == 0:
        console.print("FAILED: nothing was replayed, so nothing was shown", highlight=False)
        return 1
    return 0
