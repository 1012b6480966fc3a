"""Session windows by event time: what is sent when, by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from backend.aggregates import collect_list, count, reducer, sum_
from backend.batch import MESSAGE_FIELDS, NO_TIME
from backend.errors import UnknownFormat
from backend.store.protocol import Changes, Region
from backend.store.workspace import Workspace
from backend.windows import ledger
from backend.windows.definitions import session
from backend.windows.merging import rows
from backend.windows.merging.nodes import Nodes
from backend.windows.merging.one_by_one import Live, OneByOne, Terms
from backend.windows.merging.rows import NEVER
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.support.counting_store import CountingStore
from tests.unit.one_shard import SCHEMA, OneShard


def shard(aggregates=None, **options):
    options = {"keys": ["key"], "retention": 20, "max_ahead": None, **options}
    return OneShard(window_spec(session(10), SCHEMA, aggregates or {"sum": sum_("value")}, **options))


def test_a_session_is_full_when_the_clock_passes_its_last_message_and_the_gap():
    s = shard()
    assert s.batch([(0, 0, "a", 1), (1, 10, "a", 2), (2, 20, "b", 4)]) == []
    assert s.batch([(3, 20, "b", 8)]) == []  # 20 is 10 + gap: still the same session, had it been "a"
    assert s.batch([(4, 21, "b", 16)]) == [("full", 0, 0, 10, "a", 3)]
    assert s.batch([], drain=True) == [("drain", 0, 20, 21, "b", 28)]


def test_one_message_is_a_session_of_no_length():
    s = shard()
    assert s.batch([(0, 5, "a", 1), (1, 16, "a", 2)]) == [("full", 0, 5, 5, "a", 1)]


def test_a_session_that_grows_after_its_end_withdraws_its_row():
    s = shard(policies=policies(late="each"))
    # 11 closes [0, 0]; the message at 3 is near it, and the session reaches beyond the clock again
    assert s.batch([(0, 0, "a", 1), (1, 11, "b", 9), (2, 3, "a", 2)]) == [("full", 0, 0, 0, "a", 1)]
    assert s.batch([(3, 14, "b", 9)]) == [("retracted", 0, 0, 0, "a", 1), ("full", 0, 0, 3, "a", 3)]


def test_a_late_message_within_a_session_is_a_later_revision():
    s = shard(policies=policies(late="each"))
    s.batch([(0, 0, "a", 1), (1, 8, "a", 2), (2, 30, "b", 9)])
    assert s.batch([(3, 4, "a", 8)]) == [("late", 1, 0, 8, "a", 11)]


def test_a_late_message_between_two_sessions_makes_them_one():
    s = shard({"all": collect_list("value")}, retention=100, policies=policies(late="each"))
    assert s.batch([(0, 0, "a", 1), (1, 18, "a", 2), (2, 50, "b", 9)]) == [
        ("full", 0, 0, 0, "a", [1]),
        ("full", 0, 18, 18, "a", [2]),
    ]
    assert s.batch([(3, 9, "a", 3)]) == [
        ("retracted", 0, 0, 0, "a", [1]),
        ("retracted", 0, 18, 18, "a", [2]),
        ("late", 0, 0, 18, "a", [1, 2, 3]),
    ]
    assert s.batch([(4, 10, "a", 4)]) == [("late", 1, 0, 18, "a", [1, 2, 3, 4])]


def test_all_of_it_in_one_micro_batch_is_the_same():
    s = shard({"all": collect_list("value")}, retention=100, policies=policies(late="each"))
    rows = [(0, 0, "a", 1), (1, 18, "a", 2), (2, 50, "b", 9), (3, 9, "a", 3), (4, 10, "a", 4)]
    assert s.batch(rows) == [
        ("full", 0, 0, 0, "a", [1]),
        ("full", 0, 18, 18, "a", [2]),
        ("retracted", 0, 0, 0, "a", [1]),
        ("retracted", 0, 18, 18, "a", [2]),
        ("late", 0, 0, 18, "a", [1, 2, 3, 4]),
    ]


def test_a_session_first_made_after_its_end_is_late_never_full():
    s = shard(policies=policies(late="each"))
    s.batch([(0, 30, "b", 1)])
    assert s.batch([(1, 10, "a", 2)]) == [("late", 0, 10, 10, "a", 2)]


def test_what_waits_is_sent_when_the_session_goes():
    s = shard()
    s.batch([(0, 0, "a", 1), (1, 11, "b", 9), (2, 1, "b", 5)], 0)
    assert s.outcome.next_due_ms is None  # [1, 11] of "b" is open again
    s.batch([(3, 0, "a", 2)], 1_000)
    assert s.outcome.next_due_ms == 11_000
    # 0 + gap + 1 + retention is 31
    assert s.batch([(4, 30, "b", 9)], 2_000) == [("full", 0, 1, 11, "b", 14)]
    assert s.batch([(5, 31, "b", 9)], 2_000) == []
    assert s.batch([(6, 0, "a", 4)], 2_000) == []
    assert s.errors() == [(0, 6, "out_of_retention")]
    # a gap later nothing that is taken can touch it: one of 10 is refused from 41 on
    assert s.batch([(7, 40, "b", 9)], 2_000) == []
    assert s.batch([(8, 41, "b", 9)], 2_000) == [("late", 1, 0, 0, "a", 3)]


@pytest.mark.parametrize(("clock", "taken"), [(40, True), (41, False)])
def test_a_session_stays_as_long_as_a_message_that_is_taken_can_touch_it(clock, taken):
    s = shard({"all": collect_list("value")}, policies=policies(late="each"))
    s.batch([(0, 0, "a", 1), (1, clock, "b", 9)])
    # 10 + gap + 1 + retention is 41: the last message that is a gap from [0, 0]
    late = [("retracted", 0, 0, 0, "a", [1]), ("late", 0, 0, 10, "a", [1, 2])]
    assert s.batch([(2, 10, "a", 2)]) == (late if taken else [])
    assert s.errors() == ([] if taken else [(0, 2, "out_of_retention")])
    assert s.outcome.message_count == (3 if taken else 1)


def test_a_message_out_of_retention_is_refused_though_a_session_near_it_is_open():
    s = shard({"all": collect_list("value")}, retention=0, policies=policies(late="each"))
    s.batch([(0, 20, "a", 1), (1, 28, "b", 2)])
    # 12 + gap + 1 is before the clock of 28, but [20, 20] is open until 30
    assert s.batch([(2, 12, "a", 3), (3, 9, "c", 4)]) == []
    assert s.errors() == [(0, 2, "out_of_retention"), (0, 3, "out_of_retention")]
    assert s.batch([(4, 31, "b", 5)]) == [("full", 0, 20, 20, "a", [1])]


def test_expired_sessions_leave_nothing_behind():
    s = shard({"all": collect_list("value"), "n": count()})
    s.batch([(0, 0, "a", 1), (1, 11, "b", 2), (2, 3, "a", 3)])
    s.batch([(3, 1_000, "c", 4)])
    left = {key for key in s.visible() if Region.MESSAGES <= key[0] <= Region.SESSION_INDEX}
    assert all(b"c" in key or key[0] == Region.MESSAGE_INDEX for key in left)
    assert s.outcome.message_count == 1
    assert s.outcome.replay_from == {(0, 0): 3}


def test_early_rows_are_withdrawn_when_the_session_grows():
    s = shard(policies=policies(early="each"))
    assert s.batch([(0, 0, "a", 1)]) == [("early", 0, 0, 0, "a", 1)]
    assert s.batch([(1, 0, "a", 1)]) == [("early", 1, 0, 0, "a", 2)]
    assert s.batch([(2, 5, "a", 1)]) == [("retracted", 1, 0, 0, "a", 2), ("early", 0, 0, 5, "a", 3)]
    assert s.batch([(3, 16, "b", 7)]) == [("full", 1, 0, 5, "a", 3), ("early", 0, 16, 16, "b", 7)]


def test_full_off_leaves_late_updates_only():
    s = shard(policies=policies(full=False, late="each"))
    assert s.batch([(0, 0, "a", 1), (1, 11, "b", 2)]) == []
    assert s.batch([(2, 0, "a", 3)]) == [("late", 0, 0, 0, "a", 4)]


def test_late_off_counts_and_is_silent():
    s = shard(policies=policies(late=None))
    assert s.batch([(0, 0, "a", 1), (1, 11, "b", 2)]) == [("full", 0, 0, 0, "a", 1)]
    assert s.batch([(2, 0, "a", 3)]) == []
    assert s.outcome.next_due_ms is None
    assert not [key for key in s.visible() if key[:2] in (rows.LATE_WAITS, rows.EARLY_WAITS)]


@pytest.mark.parametrize("cuts", [[], [7], [20, 21, 50]])
def test_a_session_that_closes_and_grows_again_and_again(cuts):
    """Each message of "a" comes when the clock is past its session's end, and makes it longer."""
    join = reducer("value", init=list, add=lambda s, v: [*s, v], merge=lambda a, b: a + b, output=pa.list_(pa.int64()))
    s = shard({"n": count(), "sum": sum_("value"), "all": join}, retention=10_000)
    fed = [row for at in range(40) for row in ((2 * at, 5 * at + 12, "b", 0), (2 * at + 1, 5 * at + 3, "a", at))]
    edges = [0, *cuts, len(fed)]
    found = [row for low, high in pairwise(edges) for row in s.batch(fed[low:high]) if row[4] == "a"]
    expected = []
    for at in range(39):
        if at:
            expected.append(("retracted", 0, 3, 5 * at - 2, "a", at, sum(range(at)), list(range(at))))
        expected.append(("full", 0, 3, 5 * at + 3, "a", at + 1, sum(range(at + 1)), list(range(at + 1))))
    assert found == expected


def test_a_replay_leaves_out_a_refused_message_that_a_session_covers():
    s = shard({"all": collect_list("value")}, retention=0)
    fed = [(0, 100, "a", 1), (1, 108, "a", 2), (2, 116, "a", 3), (3, 105, "a", 4), (4, 105, "b", 5), (5, 106, "a", 6)]
    s.batch(fed[:4])
    assert s.outcome.rejected == [(0, 0, 3)]
    s.batch(fed[4:])
    # at 116 a message of 105 is out of retention, though [100, 116] is open; "b" has no session to be taken for
    assert s.errors() == [(0, 4, "out_of_retention")]
    assert (s.outcome.rejected, s.outcome.replay_from) == ([(0, 0, 3)], {(0, 0): 0})
    work = Workspace(s.store, s.bounds)
    kept = dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS])))
    work.delete_many(list(kept))
    columns = [(0, 0, offset, time, 0, key, value) for offset, time, key, value in fed if offset != 3]
    schema = pa.schema([*MESSAGE_FIELDS, *SCHEMA])
    table = pa.table([pa.array([c[at] for c in columns], f.type) for at, f in enumerate(schema)], schema=schema)
    work.put_many(*s.operator.replay_rows(table).lists())
    s.operator.settle(work)
    assert dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS]))) == kept
    assert s.batch([(6, 127, "b", 5)]) == [("full", 0, 100, 116, "a", [1, 2, 3, 6])]
    s.batch([(7, 137, "b", 5)])  # 116 + 10 + 11: the session goes, and what was listed for it
    assert s.outcome.rejected == []


@pytest.mark.parametrize("cuts", [[], [3], [2, 3, 4]])
def test_a_refused_message_that_a_session_comes_to_cover_later_is_left_out_too(cuts):
    s = shard({"all": collect_list("value")}, retention=0)
    fed = [(0, 100, "a", 1), (1, 116, "b", 2), (2, 105, "a", 3), (3, 106, "a", 4), (4, 90, "a", 5)]
    for low, high in pairwise([0, *cuts, len(fed)]):
        s.batch(fed[low:high])
    # at 116 one of 105 is out of retention, one of 106 is not: [100, 100] grows over the refused one
    assert s.outcome.rejected == [(0, 0, 2)]
    assert s.outcome.message_count == 3


def test_a_refused_message_is_listed_as_long_as_a_partition_behind_may_open_a_session_there():
    s = shard({"all": collect_list("value")}, retention=0, idle_after=None)
    s.batch([(0, 200, "b", 1), (1, 150, "a", 2), (2, 150, "c", 3)], more={1: [(0, 140, "b", 4)]})
    assert s.errors() == [(0, 1, "out_of_retention"), (0, 2, "out_of_retention")]
    assert s.outcome.rejected == [(0, 0, 1), (0, 0, 2)]
    s.batch(more={1: [(1, 148, "a", 5), (2, 155, "a", 6)]})
    assert s.outcome.rejected == [(0, 0, 1), (0, 0, 2)]
    # the clock is 165: a session of "a" covers its refused message, none of "c" will
    s.batch(more={1: [(3, 165, "b", 7)]})
    assert s.outcome.rejected == [(0, 0, 1)]
    assert s.batch(more={1: [(4, 300, "b", 8)]})[0] == ("full", 0, 148, 155, "a", [5, 6])
    assert s.outcome.rejected == []


def test_state_of_the_format_before_is_refused():
    s = shard()
    s.batch([(0, 0, "a", 1)])
    work = Workspace(s.store, s.bounds)
    old = ledger.read(work)
    old.kind_format = 1
    work.put(ledger.KEY, ledger.encode(old))
    s.store.write(work.changes())
    with pytest.raises(UnknownFormat, match="format 1, known is 3"):
        s.batch([(1, 1, "a", 1)])


@pytest.mark.parametrize("values", [sum_("value"), collect_list("value")], ids=["incremental", "full state"])
def test_retention_by_number_counts_messages_of_the_source_partition(values):
    s = shard({"sum": values}, retention=1_000, retention_messages=2, policies=policies(late="each"))
    one = (lambda *found: list(found)) if values.kind == "collect_list" else (lambda *found: sum(found))
    first = [(0, 0, "a", 1), (1, 20, "b", 2), (2, 30, "b", 4), (3, 5, "a", 8)]
    # stream time before the message two places earlier than offset 3 was 0: 5 is taken
    assert s.batch(first) == [
        ("full", 0, 0, 0, "a", one(1)),
        ("retracted", 0, 0, 0, "a", one(1)),
        ("late", 0, 0, 5, "a", one(1, 8)),
    ]
    # before offset 5 it was 30, and 6 alone would have ended at 16
    assert s.batch([(4, 40, "b", 16), (5, 6, "a", 32)]) == []
    assert s.errors() == [(0, 5, "out_of_retention")]
    sessions = [key for key in s.visible() if key[0] == Region.WINDOWS]
    assert len(sessions) == 1, "what no message can touch any more is gone: a's session"
    assert s.outcome.rejected == [], "nothing covers it, or may come to"


def test_retention_by_number_goes_by_sixteenths_of_the_gap():
    spec = window_spec(
        session(1_600), SCHEMA, {"sum": sum_("value")}, retention=9_000, retention_messages=1, max_ahead=None
    )
    s = OneShard(spec)
    s.batch([(0, 0, "a", 1), (1, 1_650, "a", 2), (2, 1_650, "a", 4)])
    # stream time before the message one place earlier is 1650, in steps 1600: 0 alone ends at 1601, -1 at 1600
    s.batch([(3, 0, "a", 8), (4, -1, "a", 16)])
    assert s.errors() == [(0, 4, "out_of_retention")]


@pytest.mark.parametrize("keys", [[], ["key"]])
def test_negative_times_null_keys_and_no_key(keys):
    s = shard({}, keys=keys)
    found = s.batch([(0, -25, None, 1), (1, -20, None, 2), (2, -9, None, 3)])
    assert [row[:4] for row in found] == [("full", 0, -25, -20)]


def test_with_several_partitions_sessions_close_when_the_micro_batch_ends():
    s = shard({"all": collect_list("value")}, idle_after=None)
    assert s.batch([(0, 0, "a", 1), (1, 40, "a", 2)], more={1: [(0, 5, "a", 3)]}) == []
    assert s.batch([], more={1: [(1, 16, "b", 4)]}) == [("full", 0, 0, 5, "a", [1, 3])]


def test_an_empty_start_is_fine():
    s = shard()
    assert s.batch([]) == []
    assert s.batch([], drain=True) == []
    assert NO_TIME not in s.visible()


class Counted(Live):
    """A session that counts how often it is asked whether it is closed."""

    asked = 0

    @property  # type: ignore[override]
    def closed(self) -> bool:
        Counted.asked += 1
        return self._is_closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._is_closed = value


def test_a_message_looks_at_the_sessions_that_it_touches_however_many_there_are():
    """A producer that sends a day again, backwards: each message joins two of very many sessions."""
    count, gap = 2_000, 10
    terms = Terms(gap, 10**7, True, 0, 0, -(10**9), NEVER, 0, False, False, policies())
    sessions = [Counted(20 * n, 20 * n, True, NEVER, 0, [n], [n]) for n in range(count)]
    clock = 20 * count + 100
    messages = [(row, 20 * (count - 1 - row) - 10, clock, clock) for row in range(count - 1)]
    Counted.asked = 0
    nodes = Nodes(count, len(messages))
    told = OneByOne(terms, nodes, ((20 * at, 20 * at, 0) for at in range(count)))
    whole = told.tell(0, sessions, messages)
    assert Counted.asked <= 10 * count
    assert (whole.first, whole.last, whole.closed) == (0, 20 * (count - 1), True)
    assert sorted(whole.shown) == list(range(count))
    leaf, join = count, count + 1
    assert (nodes.total, whole.nodes) == (count + 2, [join])
    assert nodes.message_node.tolist() == [leaf] * (count - 1)
    nodes.close()
    members = sorted(nodes.leaves(np.array([join]))[1].tolist())
    assert members == [*range(count), leaf]


class NotedStore(CountingStore):
    """Notes what was written last, too."""

    def write(self, changes: Changes) -> None:
        self.written = changes.keys
        super().write(changes)


def sessions_apart(full_state):
    """Make a shard with 500 sessions of one message each, 100 ms apart; what is read is counted from here on."""
    aggregates = {"sum": sum_("value"), **({"all": collect_list("value")} if full_state else {})}
    s = shard(aggregates, keys=[], retention=10**6, policies=policies(late="each"))
    s.store = NotedStore()
    s.batch([(at, 100 * at, "a", 1) for at in range(500)])
    s.store.read.clear()
    return s


@pytest.mark.parametrize("full_state", [False, True])
@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (50_000, [("full", 0, 49_900, 49_900, 1)]),
        (25_050, [("late", 0, 25_050, 25_050, 1)]),
        (25_010, [("retracted", 0, 25_000, 25_000, 1), ("late", 0, 25_000, 25_010, 2)]),
        (24_990, [("retracted", 0, 25_000, 25_000, 1), ("late", 0, 24_990, 25_000, 2)]),
    ],
    ids=["newest", "late", "a gap behind", "a gap before"],
)
def test_a_message_reads_the_sessions_beside_it_however_many_its_key_has(time, expected, full_state):
    s = sessions_apart(full_state)
    assert [row[:5] for row in s.batch([(500, time, "a", 1)])] == expected
    assert len(s.store.read) < 30
    assert len(s.store.written) < 30


@pytest.mark.parametrize("full_state", [False, True])
def test_sessions_between_the_messages_of_a_micro_batch_are_not_written_again(full_state):
    s = sessions_apart(full_state)
    before = s.visible()
    found = s.batch([(500, 50_000, "a", 1), (501, 1_005, "a", 1)])
    late = [("retracted", 0, 1_000, 1_000, 1), ("late", 0, 1_000, 1_005, 2)]
    assert [row[:5] for row in found] == [("full", 0, 49_900, 49_900, 1), *late]
    assert len(s.store.written) < 30
    after = s.visible()
    for region, more in ((Region.WINDOWS, 1), (Region.SESSION_INDEX, 2)):  # one longer: its index row is another
        rows_before, rows_after = ({key for key in state if key[0] == region} for state in (before, after))
        assert len(rows_after - rows_before) == more
        assert len(rows_before - rows_after) == more - 1


def test_a_message_at_the_end_of_a_long_session_finds_it_among_many():
    s = sessions_apart(False)
    s.batch([(500 + at, 25_008 + 8 * at, "a", 1) for at in range(9)])  # [25_000, 25_072]
    found = s.batch([(509, 25_082, "a", 1)])
    assert found == [("retracted", 0, 25_000, 25_072, 10), ("late", 0, 25_000, 25_082, 11)]
    assert len(s.store.written) < 30
