"""What a Kafka cluster can do to a job, point by point, on a real broker and Spark: `python -m tests.kafka.points`.

Starts a broker, does each thing to it, and prints one line for each: whether nothing was lost and all was named as it
must be, and how many tests judged it. Ends with exit code 1 if any failed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

POINTS = {
    "1 an outage under tasks that write at least once: no gap": (
        "test_kafka_sink_faults.py::test_an_outage_loses_nothing_whether_it_is_waited_for_or_not",
    ),
    "2 two queries on one changelog: the second is refused, nothing of the first is pruned": (
        "test_topics_changed.py::test_a_changelog_is_one_querys_and_what_it_lost_is_written_again_or_named",
    ),
    "3 a topic made again between two triggers: ended by name, nothing of the new one is counted": (
        "test_topics_changed.py::test_a_topic_made_again_between_two_triggers_ends_the_query_by_name",
        "test_topics_changed.py::test_a_topic_that_was_made_again_is_refused_by_every_look_and_by_a_replay",
    ),
    "4 messages larger than the topic takes: cut, marked, kept whole beside, and told": (
        "test_kafka_sink_sizes.py::test_what_is_too_large_is_cut_marked_kept_and_told",
    ),
    "5 a changelog emptied, deleted and made again: a base at once where the state is whole, else named": (
        "test_topics_changed.py::test_a_changelog_is_one_querys_and_what_it_lost_is_written_again_or_named",
        "test_changelog_kafka.py::TestKafkaChangelog::test_an_emptied_log_is_lost_until_a_base_stands_in_for_it",
    ),
}


class Outcomes:
    """A plugin of pytest: how each test went, and how long it took."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            name = report.nodeid.rpartition("/")[2].partition("[")[0]
            self.of[name].append((report.outcome, report.duration))


def main() -> int:
    """Run everything once and print a line for each point."""
    seen = Outcomes()
    tests = list(dict.fromkeys(f"{Path(__file__).parent}/{test}" for names in POINTS.values() for test in names))
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *tests], plugins=[seen]))
    for point, names in POINTS.items():
        went = [one for name in names for one in seen.of[name]]
        good = len(went) >= len(names) and all(outcome == "passed" for outcome, _ in went)
        said = "holds" if good else "FAILS"
        print(f"{said}: {point} ({len(went)} tests, {sum(seconds for _, seconds in went):.1f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
