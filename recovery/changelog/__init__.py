"""The changelog: a log with bases."""

from __future__ import annotations

import os
from functools import lru_cache

from backend.kafka_client.settings import KafkaSettings, check_topic
from recovery.changelog.file import FileChangelog
from recovery.changelog.protocol import Changelog, Entry, History, Logged
from recovery.files import check_location, check_place

KAFKA = "kafka://"

__all__ = ["KAFKA", "Changelog", "Entry", "FileChangelog", "History", "Logged", "check_changelog", "open_changelog"]


def open_changelog(uri: str | os.PathLike[str], owner: str = "") -> Changelog:
    """Open a changelog by where it is.

    Args:
        uri: A directory: path or fsspec URI. Or `kafka://host:port,host:port/topic`: security comes from
            `REWIND_KAFKA_*` in the environment of each process (`KafkaSettings.from_environment`), and a process keeps
            one changelog per topic, with its producers.
        owner: Id of the query that writes; "" for readers.

    Raises:
        ValueError: The URI's protocol is not known, or no topic is named.
    """
    text = os.fspath(uri)
    return _kafka(text, owner) if text.startswith(KAFKA) else FileChangelog(text, owner=owner)


def check_changelog(uri: str | os.PathLike[str]) -> None:
    """Check where a changelog is to be, making nothing.

    Raises:
        ValueError: Names the option.
    """
    if isinstance(uri, str) and uri.startswith(KAFKA):
        check_location(uri)
        try:
            KafkaSettings(_servers_and_topic(uri)[0])
        except ValueError as error:
            raise ValueError(f"changelog={uri!r}: {error}") from None
    else:
        check_place(uri, "changelog")


def _servers_and_topic(uri: str) -> tuple[str, str]:
    servers, _, topic = uri.removeprefix(KAFKA).partition("/")
    if not servers or not topic or "/" in topic:
        raise ValueError(f"changelog={uri!r}: must be kafka://host:port[,host:port]/topic")
    check_topic(topic, "changelog", uri)
    return servers, topic


@lru_cache(maxsize=8)
def _kafka(uri: str, owner: str) -> Changelog:
    from recovery.changelog.kafka.log import KafkaChangelog

    servers, topic = _servers_and_topic(uri)
    return KafkaChangelog(KafkaSettings.from_environment(servers), topic, owner=owner)
