"""Session windows against the oracle, message by message; cuts change neither full results, errors, nor state."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from backend.aggregates import collect_list, count, sum_
from backend.batch import MESSAGE_FIELDS
from backend.messages.rows import digest
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows.definitions import session
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.model.streams import share
from tests.oracle.windows import Message, Spec, WindowOracle, last_values
from tests.oracle.windows import Row as OracleRow
from tests.unit.one_shard import SCHEMA, OneShard, Row

GAP = 10
FAR = 10**9


def shard(retention: int, early: int | None, late: int, full_state: bool = True) -> OneShard:
    aggregates = {"n": count(), "sum": sum_("value")}
    if full_state:
        aggregates["all"] = collect_list("value")
    policy = policies(early=early, late=late)
    options = {"keys": ["key"], "retention": retention, "max_ahead": None, "policies": policy, "idle_after": None}
    return OneShard(window_spec(session(GAP), SCHEMA, aggregates, **options))


def oracle(retention: int, early: int | None, late: int) -> WindowOracle:
    spec = Spec(
        "session",
        GAP,
        keys=("key",),
        aggregates=(("count", None), ("sum", "value"), ("collect_list", "value")),
        retention_ms=retention,
        early_ms=early,
        late_ms=late,
    )
    return WindowOracle(spec, batched=True)


def rows_of(s: OneShard) -> list[OracleRow]:
    assert s.outcome is not None
    return [
        OracleRow(
            r["reason"], r["revision"], (r["window_start"], r["window_end"]), (r["key"],), (r["n"], r["sum"], r["all"])
        )
        for r in s.outcome.results.to_pylist()
    ]


STEPS = st.sampled_from((0, 1, 2, 4, 6, 9, 10, 11, 12, 15, 25, 60, -1, -3, -6, -9, -10, -11, -14, -20, -28, -40, -70))
MESSAGES = st.lists(st.tuples(STEPS, st.sampled_from("aab")), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=4)
RETENTIONS = st.sampled_from((0, 3, 12, 30, 1000))


def stream(drawn: list[tuple[int, str]]) -> list[Row]:
    newest, out = 0, []
    for number, (step, key) in enumerate(drawn):
        out.append((2 * number, newest + step, key, number))
        newest = max(newest, newest + step)
    return out


def cut(rows: list[Row], cuts: list[int]) -> list[list[Row]]:
    edges = [0, *sorted(min(c, len(rows)) for c in cuts), len(rows)]
    return [rows[a:b] for a, b in pairwise(edges)]


def feed(judge: WindowOracle, batch: list[Row], wall: int, drain: bool) -> list[OracleRow]:
    before = len(judge.rows)
    for offset, time, key, value in batch:
        judge.add_message(Message(offset, time, {"key": key, "value": value}), wall)
    judge.end_of_batch(wall, drain=drain)
    return judge.rows[before:]


def check_messages(s: OneShard, rows: list[Row]) -> None:
    """The message store is what ledger and proofs say, and what a settled replay brings."""
    assert s.outcome is not None
    work = Workspace(s.store, s.bounds)
    held = dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS])))
    found = work.scan_arrays(bytes([Region.MESSAGES]), bytes([Region.MESSAGES + 1]))
    assert (s.outcome.message_count, s.outcome.message_digest) == (len(found[0]), digest(*found))
    proofs = list(s.operator.proofs(work))
    assert sum(proof.count for proof in proofs) == len(found[0])
    for proof in proofs:
        mine = work.scan_arrays(proof.start, proof.end)
        assert (len(mine[0]), digest(*mine)) == (proof.count, proof.digest), proof.label
    work.delete_many(list(held))
    start = s.outcome.replay_from.get((0, 0), FAR)
    taken = [(0, 0, o, t, 0, k, v) for o, t, k, v in rows if o >= start and (0, 0, o) not in s.outcome.rejected]
    schema = pa.schema([*MESSAGE_FIELDS, *SCHEMA])
    table = pa.table([pa.array([c[at] for c in taken], f.type) for at, f in enumerate(schema)], schema=schema)
    work.put_many(*s.operator.replay_rows(table).lists())
    s.operator.settle(work)
    assert dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS]))) == held


def key_of(row: OracleRow) -> str:
    return repr(row)


@share(0.32)
@given(
    drawn=MESSAGES,
    cuts=CUTS,
    retention=RETENTIONS,
    early=st.sampled_from((None, 0, 5_000)),
    late=st.sampled_from((0, 5_000, FAR)),
)
def test_every_row_is_the_oracle_s(drawn, cuts, retention, early, late):
    rows = stream(drawn)
    judge, s = oracle(retention, early, late), shard(retention, early, late)
    done: list[Row] = []
    batches = cut(rows, cuts)
    errors = 0
    for number, batch in enumerate(batches):
        drain, wall = early is None and number == len(batches) - 1, 3_000 * (number + 1)
        done += batch
        s.batch(batch, wall, drain=drain)
        expected = feed(judge, batch, wall, drain)
        assert sorted(rows_of(s), key=key_of) == sorted(expected, key=key_of)
        assert sorted((0, e[1]) for e in s.errors()) == sorted((0, e.place[2]) for e in judge.errors[errors:])
        errors = len(judge.errors)
        check_messages(s, done)


@share(0.24)
@given(drawn=MESSAGES, cuts=CUTS, retention=RETENTIONS, full_state=st.booleans())
def test_cuts_change_neither_full_results_nor_errors_nor_state(drawn, cuts, retention, full_state):
    rows = stream(drawn)
    whole, parts = shard(retention, None, FAR, full_state), shard(retention, None, FAR, full_state)
    expected = whole.batch(rows, 0)
    errors = whole.errors()
    found, refused = [], []
    for batch in cut(rows, cuts):
        found += parts.batch(batch, 0)
        refused += parts.errors()
    assert found == expected  # the order too
    assert refused == errors
    assert parts.visible() == whole.visible()


@share(0.12)
@given(
    drawn=st.lists(st.tuples(STEPS, st.sampled_from("aab"), st.integers(0, 1)), max_size=20),
    cuts=CUTS,
    retention=RETENTIONS,
)
def test_two_source_partitions_keep_their_messages(drawn, cuts, retention):
    rows = stream([(step, key) for step, key, _ in drawn])
    s = shard(retention, None, 0)
    standing: list[OracleRow] = []
    number = 0
    for batch in cut(rows, cuts):
        sides: dict[int, list[Row]] = {0: [], 1: []}
        for row in batch:
            sides[drawn[number][2]].append(row)
            number += 1
        s.batch(sides[0], more={1: sides[1]})
        standing += rows_of(s)
        assert s.outcome is not None
        work = Workspace(s.store, s.bounds)
        found = work.scan_arrays(bytes([Region.MESSAGES]), bytes([Region.MESSAGES + 1]))
        assert (s.outcome.message_count, s.outcome.message_digest) == (len(found[0]), digest(*found))
        for proof in s.operator.proofs(work):
            mine = work.scan_arrays(proof.start, proof.end)
            assert (len(mine[0]), digest(*mine)) == (proof.count, proof.digest), proof.label
    s.batch([], 10, drain=True)
    shown = [value for values in last_values(standing + rows_of(s)).values() for value in values[2]]
    assert len(shown) == len(set(shown))  # no message is in two sessions
