"""Offsets of a source as Spark logs and reports them: JSON of the source's own shape.

* Kafka's: `{"<topic>": {"<partition>": next offset}}`.
* The archive's: the same below `next`, beside `format` and `first` (`backend.sources.archive_reader`).
* Others, the control stream's above all, name no source partitions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend.sources import TopicPartition


def offset_json(positions: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Give Kafka's shape of positions; `positions_in` reads it.

    >>> offset_json({("t", 1): 7, ("t", 0): 5})
    {'t': {'0': 5, '1': 7}}
    """
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), following in sorted(positions.items()):
        topics.setdefault(topic, {})[str(partition)] = following
    return topics


def is_ours(offset: Any) -> bool:
    """Return whether a source of ours gave an offset, which says its format; Spark's connector says none.

    >>> is_ours('{"format": 1, "asked": 3}'), is_ours('{"logOffset": 9}'), is_ours(None), is_ours("-")
    (True, False, False, False)
    """
    return isinstance(_parts(offset).get("format"), int)


def positions_in(offset: Any) -> dict[TopicPartition, int]:
    """Give the next offset of each source partition.

    Args:
        offset: JSON as text, as in the offset log and in a query's progress, or already read.

    >>> positions_in('{"t": {"0": 5, "1": 7}}')
    {('t', 0): 5, ('t', 1): 7}
    >>> positions_in({"format": 1, "next": {"t": {"0": 5}}, "first": {"t": {"0": 2}}})
    {('t', 0): 5}
    >>> positions_in('{"next": {"0": 5}}')  # a topic may be called so
    {('next', 0): 5}
    >>> positions_in('{"format": 1, "asked": 3}'), positions_in("-"), positions_in(None)
    ({}, {}, {})
    """
    topics = _parts(offset)
    if isinstance(topics.get("format"), int) and isinstance(topics.get("next"), Mapping):
        topics = topics["next"]
    return {
        (topic, int(partition)): int(following)
        for topic, partitions in topics.items()
        if isinstance(partitions, Mapping)
        for partition, following in partitions.items()
        if partition.isdigit()
    }


def _parts(offset: Any) -> Mapping[str, Any]:
    """Return what is in an offset; nothing where it is no JSON object."""
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}
