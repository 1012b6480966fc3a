"""Watch a running query's sources from the driver: in every micro-batch, at every start, before every restore."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from backend.errors import UNDECODABLE, unknown_format
from backend.sources import Source, TopicPartition
from backend.sources.spark_offsets import offset_json, positions_in
from backend.spark.resume import committed_positions
from recovery.files import open_files

LEADER_EPOCHS = "rewind/epochs.json"
FORMAT = 1


class SourceWatch:
    """The watches of all sources that have one (`KafkaSource.watch`), and the epochs that they found.

    Args:
        checkpoint: Spark's checkpoint location.
        sources: In the order of the job's inputs.
    """

    def __init__(self, checkpoint: str, sources: Sequence[Source]) -> None:
        self._checkpoint, self._lock = checkpoint, threading.Lock()
        self._watches: list[tuple[int, Any]] = [
            (number, source.watch()) for number, source in enumerate(sources) if hasattr(source, "watch")
        ]
        self._unsaved = False
        leader_epochs = self._read() if self._watches else {}
        for _, watch in self._watches:
            mine = {key: leader_epoch for key, leader_epoch in leader_epochs.items() if key[0] in watch.topics}
            watch.leader_epochs |= mine

    def look(self, *, beside: bool = False) -> None:
        """Look at every source; what is new of the epochs is durable on return.

        Args:
            beside: A micro-batch may be under way: new epochs are left to the next look that is not beside one.

        Raises:
            SourceWentBack: A topic was deleted and made again, or a partition has lost its end.
            SourceUnavailable: A cluster does not answer.
        """
        with self._lock:
            for number, watch in self._watches:
                changed = watch.look(lambda number=number: self._committed(number), keep=not beside)
                self._unsaved = changed or self._unsaved  # until it is written, also when a later watch raises
            if not self._unsaved:
                return
            leader_epochs = {
                key: leader_epoch for _, watch in self._watches for key, leader_epoch in watch.leader_epochs.items()
            }
            content = {"format": FORMAT, "epochs": offset_json(leader_epochs)}
            open_files(self._checkpoint).write(LEADER_EPOCHS, [json.dumps(content).encode()])
            self._unsaved = False

    def close(self) -> None:
        """Let the clients go; the next look makes new ones."""
        with self._lock:
            for _, watch in self._watches:
                watch.close()

    def _committed(self, number: int) -> dict[TopicPartition, int]:
        positions = committed_positions(self._checkpoint)
        return positions[number] if number < len(positions) else {}

    def _read(self) -> dict[TopicPartition, int]:
        """Read the epochs; nothing where there is no file: then a loss before this start is not seen."""
        try:
            content = json.loads(open_files(self._checkpoint).read(LEADER_EPOCHS))
            written = content.get("format")
        except (FileNotFoundError, *UNDECODABLE):  # torn by a disk: as if it were not there, and it is written again
            return {}
        if written != FORMAT:
            what = "the epochs of the source's partitions have an unknown format"
            raise unknown_format(what, f"format {written!r}", FORMAT, f"{self._checkpoint}/{LEADER_EPOCHS}")
        return positions_in(content["epochs"])
