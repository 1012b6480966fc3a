"""A micro-batch that ran again and made other rows than are in the topics: an error by name, and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from backend import kafka_sink
from backend.errors import OutputDiffers
from backend.sinks.kafka import commits as kafka_commits
from tests.kafka.test_kafka_sink import errors, frame, ids, produced, results, topics

__all__ = ["topics"]

pytestmark = [pytest.mark.kafka, pytest.mark.gentle]


def opened(settings: Any, topics: tuple[str, str], **options: Any) -> Any:
    sink = kafka_sink(*topics, servers=settings, **options)
    sink.open("q")
    return sink


def test_other_rows_are_refused_by_name_also_by_a_new_process(kafka_broker, topics):
    settings = kafka_broker.settings
    sink = opened(settings, topics)
    published = [frame(0, 4, results(3, 4)), frame(1, 4, results(5), errors(9))]
    told = sink.finish(published, 4)
    found = kafka_commits.newest(settings, f"{topics[0]}-commits")
    rows = {kind: {shard: content[0] for shard, content in held.items()} for kind, held in found.contents.items()}
    assert rows == {"results": {0: 2, 1: 1}, "errors": {1: 1}}
    for changed, why in (
        ([frame(0, 4, results(3, 5)), published[1]], "shard 0 published 2 results, now others"),
        ([published[0]], "shard 1 published 1 results, now 0"),
        ([published[0], frame(1, 4, results(5), errors(8))], "shard 1 published 1 errors, now others"),
        ([], "shard 0 published 2 results, now 0"),
    ):
        for one in (sink, again := opened(settings, topics)):
            with pytest.raises(OutputDiffers, match="micro-batch 4 was published, ran again, and made other rows") as e:
                one.finish(changed, 4)
            assert e.value.why.startswith(why)
            assert "accept_published=4" in e.value.command
            assert f"{topics[0]}-commits" in e.value.where
            sink = again  # the newest writer
    assert sink.finish(published, 4) == told
    assert ids(settings, topics[0]) == ["4-0-0", "4-0-1", "4-1-0"]


def test_what_is_out_counts_where_the_sink_was_told_so_for_that_micro_batch_only(kafka_broker, topics, caplog):
    settings = kafka_broker.settings
    opened(settings, topics).finish([frame(0, 4, results(3))], 4)
    accepting = opened(settings, topics, accept_published=4)
    accepting.finish([frame(0, 4, results(8, 9))], 4)
    assert "what readers have seen stays" in caplog.text
    accepting.finish([frame(0, 5, results(6))], 5)
    with pytest.raises(OutputDiffers):
        accepting.finish([frame(0, 5, results(7))], 5)
    assert ids(settings, topics[0]) == ["4-0-0", "5-0-0"]


def test_at_least_once_stops_before_sparks_commit_when_other_rows_came(kafka_broker, topics):
    settings = kafka_broker.settings
    sink = opened(settings, topics, guarantee="at_least_once")
    produced(sink, [frame(0, 4, results(3))], 4)
    produced(sink, [frame(0, 4, results(3))], 4)
    with pytest.raises(OutputDiffers, match="micro-batch 4"):
        produced(sink, [frame(0, 4, results(8))], 4)


def test_a_record_of_the_release_before_is_compared_with_nothing(kafka_broker, topics):
    settings = kafka_broker.settings
    sink = opened(settings, topics)
    sink.finish([frame(0, 4, results(3))], 4)
    sink._writer._newest = kafka_commits.Published("q", 4, 1)  # as release 0.1 would have said
    sink.finish([frame(0, 4, results(8))], 4)
    assert ids(settings, topics[0]) == ["4-0-0"]
