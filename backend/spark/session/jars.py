"""Resolve the jars that Kafka needs with the Ivy that ships inside PySpark.

Resolved sets lie in a cache of our own, one directory per set, complete or absent::

    <cache>/jars/<name>-<digest of the coordinates>/<artifact>-<revision>.jar
    <cache>/ivy/                                    Ivy's own downloads
    <cache>/lock                                    one resolution at a time on this machine

Environment:
    REWIND_CACHE: The cache, default `$XDG_CACHE_HOME/rewind` or `~/.cache/rewind`.
    REWIND_JARS: An offline folder; every jar must be in it or below it, and nothing is downloaded.
    REWIND_IVY_SETTINGS: An Ivy settings file, for a mirror of one's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from backend.errors import JarsUnavailable

TRIES = 4
TRY_TIMEOUT_S = 240
LOCK_TIMEOUT_S = 600
_LOG_LINES = 12


@dataclass(frozen=True, slots=True, order=True)
class Artifact:
    """Coordinates of one jar.

    >>> str(Artifact("org.apache.kafka", "kafka-clients", "3.9.2"))
    'org.apache.kafka:kafka-clients:3.9.2'
    """

    group: str
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.group}:{self.name}:{self.revision}"

    @property
    def file_name(self) -> str:
        """Name of the jar in a resolved set."""
        return f"{self.name}-{self.revision}.jar"


@dataclass(frozen=True, slots=True)
class JarSet:
    """Artifacts that belong together.

    Attributes:
        name: Used in paths and messages.
        artifacts: What to resolve.
        transitive: Whether their runtime dependencies belong to the set; False where the artifacts are the whole set.
        marker: A class in one of the jars that tells whether the set is already loaded.
    """

    name: str
    artifacts: tuple[Artifact, ...]
    transitive: bool
    marker: str

    @property
    def folder(self) -> str:
        """Directory name in the cache; other coordinates are another directory."""
        text = "\n".join([*map(str, self.artifacts), str(self.transitive)])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


_CONNECTORS = {
    # The connector's own pom asks for revisions of the token provider that are not published; this set reads, streams
    # and writes. The codecs (lz4, snappy, zstd) are PySpark's own.
    "4.2": JarSet(
        name="spark-kafka-4.2",
        artifacts=(
            Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
            Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
            Artifact("org.apache.kafka", "kafka-clients", "3.9.2"),
            Artifact("org.apache.commons", "commons-pool2", "2.12.0"),
        ),
        transitive=False,
        marker="org.apache.spark.sql.kafka010.KafkaSourceProvider",
    ),
}

BROKER = JarSet(
    name="kafka-broker",
    artifacts=(
        Artifact("org.apache.kafka", "kafka_2.13", "4.1.0"),
        Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),  # without it the broker logs nothing
    ),
    transitive=True,
    marker="kafka.Kafka",
)
"""A Kafka broker and its tools, for tests and drills."""


def connector(version: str | None = None) -> JarSet:
    """Give Spark's Kafka connector for a PySpark version, the running one by default.

    Raises:
        JarsUnavailable: No set is known for that version.
    """
    version = version or pyspark.__version__
    minor = ".".join(version.split(".")[:2])
    if minor not in _CONNECTORS:
        raise JarsUnavailable(
            f"no Kafka connector is known for PySpark {version}",
            why=f"known: {', '.join(sorted(_CONNECTORS))}",
            command='read with the client, which needs no jars: kafka(..., reader="client"); or set spark.jars (or'
            " spark.jars.packages) to the connector for that version yourself",
        )
    return _CONNECTORS[minor]


def cache_dir() -> Path:
    """Give the directory that jars are cached in; it need not exist."""
    if own := os.environ.get("REWIND_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "rewind"


def resolve(jars: JarSet, *, tries: int = TRIES, timeout_s: float = TRY_TIMEOUT_S) -> list[Path]:
    """Give the paths of a set's jars, sorted; resolved on first use, from the cache afterwards.

    Args:
        jars: The set.
        tries: How often to ask: a first request may fail and the next succeed.
        timeout_s: Bound of one try.

    Raises:
        JarsUnavailable: An offline folder lacks a jar, Java is not installed, or every try failed.
    """
    if offline := os.environ.get("REWIND_JARS"):
        return _from_folder(jars, Path(offline).expanduser())
    target = cache_dir() / "jars" / jars.folder
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir() / "lock"):
            if not target.is_dir():  # another process may have resolved it while this one waited
                _download(jars, target, tries, timeout_s)
    return sorted(target.glob("*.jar"))


def class_path(paths: Sequence[Path]) -> str:
    """Join jars for `java -cp`."""
    return os.pathsep.join(map(str, paths))


def java() -> str:
    """Give the Java executable: `JAVA_HOME`'s, else the one on the path.

    Raises:
        JarsUnavailable: There is none.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")
    if found is None:
        raise JarsUnavailable(
            "Java was not found", where=home or "PATH", command="install a Java 17 runtime, or set JAVA_HOME"
        )
    return found


def _from_folder(jars: JarSet, folder: Path) -> list[Path]:
    """Find a set in an offline folder: a transitive set is a subfolder of its own with all its jars."""
    if jars.transitive:
        for candidate in (folder / jars.folder, folder / jars.name):
            if candidate.is_dir():
                return sorted(candidate.glob("*.jar"))
        raise JarsUnavailable(
            f"the jars of {jars.name} are not in the offline folder",
            where=str(folder / jars.name),
            command=f"copy {cache_dir() / 'jars' / jars.folder} of a machine that resolved them to {folder}",
        )
    found = {path.name: path for path in sorted(folder.rglob("*.jar"))}
    missing = [artifact for artifact in jars.artifacts if artifact.file_name not in found]
    if missing:
        raise JarsUnavailable(
            f"jars of {jars.name} are not in the offline folder",
            where=str(folder),
            why="missing: " + ", ".join(map(str, missing)),
            command="put them there, or unset REWIND_JARS to resolve them",
        )
    return sorted(found[artifact.file_name] for artifact in jars.artifacts)


def _ivy_jar() -> Path:
    """Find the Ivy that PySpark ships."""
    homes = list(filter(None, [os.environ.get("SPARK_HOME"), str(Path(pyspark.__file__).parent)]))
    for home in homes:
        if found := sorted((Path(home) / "jars").glob("ivy-*.jar")):
            return found[-1]
    raise JarsUnavailable(
        "the Ivy jar of PySpark was not found",
        where=", ".join(homes),
        command="pip install pyspark, or set REWIND_JARS to a folder that has the jars",
    )


def _ivy_file(jars: JarSet) -> str:
    """Write the set as an Ivy module with one dependency per artifact."""
    rows = "\n".join(
        f'    <dependency org="{a.group}" name="{a.name}" rev="{a.revision}" conf="default->default"'
        f' force="true" transitive="{str(jars.transitive).lower()}"/>'
        for a in jars.artifacts
    )
    return (
        '<ivy-module version="2.0">\n'
        f'  <info organisation="rewind" module="{jars.name}"/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        f"  <dependencies>\n{rows}\n  </dependencies>\n</ivy-module>\n"
    )


def _download(jars: JarSet, target: Path, tries: int, timeout_s: float) -> None:
    """Retrieve into a directory beside the target and rename it when every jar is whole."""
    log = ""
    for attempt in range(tries):
        work = Path(tempfile.mkdtemp(prefix=f".{jars.name}-", dir=target.parent))
        try:
            log = _run_ivy(jars, work, timeout_s)
            if not log:
                (work / "ivy.xml").unlink()
                work.rename(target)
                return
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if attempt + 1 < tries:
            time.sleep(2**attempt)
    raise JarsUnavailable(
        f"the jars of {jars.name} could not be resolved in {tries} tries",
        where=", ".join(map(str, jars.artifacts)),
        why=log,
        command="check the network, set REWIND_IVY_SETTINGS to a mirror, or REWIND_JARS to a folder that has the jars",
    )


def _run_ivy(jars: JarSet, work: Path, timeout_s: float) -> str:
    """Run Ivy once; give an empty text when all jars are there and whole, else the end of its log."""
    (work / "ivy.xml").write_text(_ivy_file(jars))
    settings = os.environ.get("REWIND_IVY_SETTINGS")
    command = [
        java(), "-Xmx256m", "-jar", str(_ivy_jar()),
        *(["-settings", settings] if settings else []),
        "-cache", str(cache_dir() / "ivy"),
        "-ivy", str(work / "ivy.xml"),
        "-types", "jar", "bundle",
        "-retrieve", f"{work}/[artifact]-[revision](-[classifier]).[ext]",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    names = {path.name for path in work.glob("*.jar") if zipfile.is_zipfile(path)}
    broken = {path.name for path in work.glob("*.jar")} - names
    missing = [str(a) for a in jars.artifacts if a.file_name not in names]
    if done.returncode == 0 and not missing and not broken:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    problems = [line for line in lines if line and ("ERROR" in line or "WARN" in line or "UNRESOLVED" in line.upper())]
    problems += [f"not a jar: {name}" for name in sorted(broken)] + [f"missing: {name}" for name in missing]
    return " | ".join((problems or lines)[-_LOG_LINES:]) or f"Ivy ended with {done.returncode}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the cache's lock; Ivy's cache takes one writer."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise JarsUnavailable(
                        f"another process resolves jars for more than {LOCK_TIMEOUT_S} s",
                        where=str(path),
                        command="end that process; the lock goes with it",
                    ) from None
                time.sleep(0.2)
        yield


def main() -> None:
    """Resolve Spark's Kafka connector and print its jars, joined by commas: a value for `spark.jars`."""
    print(",".join(map(str, resolve(connector()))))


if __name__ == "__main__":
    main()
