"""Quick starts for the many short-lived JVMs of the tests and of the small benchmarks: `... quick_java COMMAND ...`.

A JVM that Spark runs in loads some 15,000 classes and verifies each, which is half of the ten seconds until its first
query has ended. A class data sharing archive holds them as they are in memory (JEP 350). It is made once per Java
and PySpark, and maps only where both are the ones that it was made with: otherwise the JVM starts as without.

    python -m tests.support.quick_java [COMMAND ...]

makes the archives that are missing, half a minute, and becomes the command with them in its environment.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.errors import JarsUnavailable, RewindError
from backend.spark.session import jars
from recovery.testing.broker import LocalBroker
from recovery.testing.events import Topics

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 300
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""None of these JVMs lives long enough to get back what the second compiler takes of two cores.

Without that compiler the JVM keeps 48 MB for code, which Spark fills within minutes; then it compiles nothing any more.
"""
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""An archive that does not fit is no news: a JVM with other jars starts as it would without."""


def folder() -> Path | None:
    """Give the directory of this Java's and this PySpark's archives; None where there is no Java."""
    import pyspark

    try:
        with told("JAVA_TOOL_OPTIONS", ""):  # which it would tell, too
            about = subprocess.run([jars.java(), "-version"], capture_output=True, text=True, check=True).stderr
    except JarsUnavailable:
        return None
    name = hashlib.sha256(f"{about}\n{pyspark.__version__}\n{jars.BROKER.folder}".encode()).hexdigest()[:16]
    return Path(sys.prefix) / "java" / name


def environment() -> dict[str, str]:
    """Give the variables that let JVMs start quickly, Spark's and the broker's, with the archives that are there."""
    if SHORT_LIVED in os.environ.get("JAVA_TOOL_OPTIONS", ""):
        return {}
    place = folder()
    given = {"JAVA_TOOL_OPTIONS": SHORT_LIVED, "KAFKA_OPTS": ""}
    for name, archive in (("JAVA_TOOL_OPTIONS", "spark.jsa"), ("KAFKA_OPTS", "kafka.jsa")):
        if place is not None and (place / archive).exists():
            given[name] = f"{given[name]} -XX:SharedArchiveFile={place / archive} {QUIET}".strip()
    return {name: f"{os.environ.get(name, '')} {value}".strip() for name, value in given.items()}


def make() -> None:
    """Make the archives that are missing; what fails is told, and the tests start slower."""
    place = folder()
    if place is None:
        return
    for name, train in (("spark.jsa", train_spark), ("kafka.jsa", train_broker)):
        if (place / name).exists():
            continue
        print(f"Making {place / name}: classes as this Java has them in memory, once.", flush=True)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            made = Path(scratch) / name
            try:
                train(made, Path(scratch))
                made.rename(place / name)
            except (OSError, subprocess.SubprocessError, RewindError) as error:
                print(f"Not made, so each JVM starts slower: {error}", file=sys.stderr, flush=True)


def train_spark(made: Path, scratch: Path) -> None:
    """Write the archive of the classes that a query of windows and some batch SQL load.

    Raises:
        subprocess.SubprocessError: The process failed, or took too long.
    """
    command = [sys.executable, "-m", "tests.support.train_java", str(made), str(scratch)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = os.environ | {"JAVA_TOOL_OPTIONS": SHORT_LIVED, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable}
    with (scratch / "log").open("w+") as log:
        try:
            subprocess.run(command, cwd=scratch, env=own, stdout=log, stderr=log, check=True, timeout=PATIENCE_S)
        except subprocess.SubprocessError:
            log.seek(0)
            sys.stderr.write(log.read()[-3000:])
            raise


def train_broker(made: Path, scratch: Path) -> None:
    """Write the archive of the classes that a broker loads until a transaction has been written and read.

    Raises:
        RewindError: It did not start.
        TimeoutError: It did not end.
    """
    options = f"-XX:ArchiveClassesAtExit={made} {QUIET}"
    with told("JAVA_TOOL_OPTIONS", SHORT_LIVED), told("KAFKA_OPTS", options), LocalBroker() as broker:
        topics = Topics(broker.settings)
        topics.produce(topics.create(2), range(10), transaction="commit")
        process = broker.pid
        assert process is not None
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while broker.pid is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the broker did not end within {PATIENCE_S} s of SIGTERM")
            time.sleep(0.05)


@contextmanager
def told(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment while the block runs; without a value there is none."""
    before = os.environ.pop(name, None)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def main() -> None:
    """Make what is missing, and become the command that was given."""
    make()
    if command := sys.argv[1:]:
        os.execvpe(command[0], command, os.environ | environment())


if __name__ == "__main__":
    main()
