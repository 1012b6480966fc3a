"""The changelog: a log with bases."""

from __future__ import annotations

import os
from functools import lru_cache

from recovery.changelog.file import FileChangelog
from recovery.changelog.protocol import Changelog, Entry, History, Logged

KAFKA = "kafka://"

__all__ = ["Changelog", "Entry", "FileChangelog", "History", "Logged", "open_changelog"]


def open_changelog(uri: str | os.PathLike[str]) -> Changelog:
    """Open a changelog by where it is.

    Args:
        uri: A directory: path or fsspec URI. Or `kafka://host:port,host:port/topic`: security comes from
            `REWIND_KAFKA_*` in the environment of each process (`KafkaSettings.from_environment`), and a process keeps
            one changelog per topic, with its producers.

    Raises:
        ValueError: The URI's protocol is not known, or no topic is named.
    """
    text = os.fspath(uri)
    return _kafka(text) if text.startswith(KAFKA) else FileChangelog(text)


@lru_cache(maxsize=8)
def _kafka(uri: str) -> Changelog:
    from backend.sources.kafka_settings import KafkaSettings
    from recovery.changelog.kafka import KafkaChangelog

    servers, _, topic = uri.removeprefix(KAFKA).partition("/")
    if not topic or "/" in topic:
        raise ValueError(f"changelog={uri!r}: must be kafka://host:port[,host:port]/topic")
    return KafkaChangelog(KafkaSettings.from_environment(servers), topic)
