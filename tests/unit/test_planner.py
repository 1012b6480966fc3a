"""The planner against a model that shares nothing with it: reachability in a graph of states, over all combinations."""

from __future__ import annotations

from itertools import product

import pytest

from backend.batch import Position
from backend.errors import HistoryLost
from recovery.commit.pointer import At, Commit, CommitRecord, Pointer
from recovery.restore.planner import (
    Advance,
    Ahead,
    Database,
    Fetch,
    Local,
    Lost,
    Missing,
    Nothing,
    Plan,
    Rebuild,
    Remote,
    Start,
    Step,
    Unreadable,
    Use,
    missing_offsets,
    plan,
    ranges_since,
    replay_ranges,
)
from recovery.snapshots.manifest import Snapshot

# the committed lineage is A(1) <- B(2) <- C(4) <- D(5); the pointer is at D; E(6) came after; X(5), Y(3) are foreign
A, B, C, D, E = (Commit(version, name * 32) for version, name in [(1, "a"), (2, "b"), (4, "c"), (5, "d"), (6, "e")])
X, Y = Commit(5, "f" * 32), Commit(3, "0" * 32)
PARENT = {A: None, B: A, C: B, D: C, E: D, X: C, Y: A}


def ancestors(commit: Commit) -> tuple[Commit, ...]:
    parent = PARENT[commit]
    return (parent, *ancestors(parent)) if parent else ()


POINTER = Pointer(0, D, C, 100, "digest", [(0, 0, Position(50, 9, 9))], {}, "0/d.delta")


def record(messages: int, replay_from: int | None, known: bool = False) -> CommitRecord:
    return CommitRecord(
        shard=0,
        commit=D,
        parent=C,
        ancestors=list(ancestors(D)) if known else [],
        time_ms=0,
        positions=[(0, 0, Position(50, 9, 9))],
        bounds={},
        replay_from=[] if replay_from is None else [(0, 0, replay_from)],
        message_count=messages,
    )


DATABASES: list[Database] = [
    Nothing(),
    Unreadable("block checksum mismatch"),
    At(None),
    *(At(commit, {(0, 0): 30}) for commit in (A, B, C, D, E, X, Y)),
]


def offer(commit: Commit, parent: Commit | None, full: bool) -> Snapshot:
    return Snapshot(0, commit, parent, "folder" if full else "", [])


STEPS = {commit: offer(commit, PARENT[commit], False) for commit in (A, B, C, D, X)}
OFFERS = [
    (),
    (offer(D, None, True),),
    (offer(B, None, True),),
    (offer(B, None, True), STEPS[C], STEPS[D]),
    (offer(A, None, True), offer(C, None, True), STEPS[B], STEPS[C], STEPS[D]),
    (offer(A, None, True), STEPS[C], STEPS[D]),  # a gap at B
    (STEPS[A], STEPS[B], STEPS[C], STEPS[D]),
    (offer(X, None, True), STEPS[X], offer(Y, None, True)),  # only foreign ones
    (STEPS[D],),
]
RECORDS = [None, record(0, None), record(7, 20), record(7, None), record(7, 20, known=True)]
SOURCES = [None, {(0, 0): (0, 60)}, {(0, 0): (20, 50)}, {(0, 0): (21, 60)}, {(0, 0): (31, 60)}, {(0, 0): (0, 49)}, {}]


def reaches(start: Commit | None, edges: dict[Commit | None, set[Commit]]) -> bool:
    """Tell whether ingesting along the edges leads from `start` to the pointer, exploring all ways forward."""
    seen, todo = set(), [start]
    while todo:
        at = todo.pop()
        if at == D:
            return True
        if at not in seen:
            seen.add(at)
            todo.extend(edges.get(at, ()))
    return False


def carried_out(found: Plan, database: Database, staged: bool, offers: tuple[Snapshot, ...]) -> Commit | None:
    """Apply a plan to a toy shard, checking every precondition; give the commit that it ends at."""
    at: Commit | None
    match found:
        case Use():
            assert isinstance(database, At)
            return database.commit
        case Advance(steps):
            assert isinstance(database, At)
            at = database.commit
        case Fetch(snapshot, steps, why):
            assert snapshot is None or any(offer.full and offer.commit == snapshot for offer in offers)
            assert why
            at = snapshot
        case _:
            raise AssertionError(found)
    for step in steps:
        assert PARENT[step.commit] == at, "a file is only ever ingested on its parent"
        if step.local:
            assert staged
            assert step.commit == D
            assert not isinstance(database, Nothing)
        else:
            assert any(not offer.full and offer.commit == step.commit for offer in offers)
        at = step.commit
    return at


@pytest.mark.parametrize("database", DATABASES, ids=str)
def test_every_combination(database: Database) -> None:
    for staged, offers, row, source, in_task in product((False, True), OFFERS, RECORDS, SOURCES, (False, True)):
        local = Local(database, frozenset({D}) if staged else frozenset())
        remote = Remote(offers, row, source)
        found = plan(POINTER, local, remote, in_task=in_task)
        edges: dict[Commit | None, set[Commit]] = {}
        for offer in offers:
            if not offer.full:
                edges.setdefault(offer.parent, set()).add(offer.commit)
        if staged and not isinstance(database, Nothing):
            edges.setdefault(C, set()).add(D)
        here = database.commit if isinstance(database, At) else None
        newer = here is not None and (D in ancestors(here) or here.version > D.version)
        snapshots = [offer.commit for offer in offers if offer.full and reaches(offer.commit, edges)]
        context = f"{local} {remote} {in_task}: {found}"
        if here == D:
            assert found == Use(), context
        elif newer and in_task:
            assert isinstance(found, Ahead), context
        elif isinstance(database, At) and reaches(here, edges):
            assert isinstance(found, Advance), context
            assert carried_out(found, database, staged, offers) == D, context
        elif snapshots:
            assert isinstance(found, Fetch), context
            assert found.snapshot == max(snapshots), context
            assert carried_out(found, database, staged, offers) == D, context
        elif reaches(None, edges):  # steps back to the first commit, on an empty database
            assert isinstance(found, Fetch), context
            assert found.snapshot is None, context
            assert carried_out(found, database, staged, offers) == D, context
        elif row is not None and row.message_count == 0:
            assert isinstance(found, Rebuild), context
            assert (found.start, found.ranges) == (None, {}), context
        elif in_task:
            assert isinstance(found, Missing), context
            assert found.why, context
        elif row is None:
            assert isinstance(found, Lost), context
            assert isinstance(found.error, HistoryLost), context
        elif here in ancestors(D) and row.ancestors and source and source[0, 0] in ((0, 60), (20, 50), (21, 60)):
            assert isinstance(found, Rebuild), context
            assert (found.start, found.ranges) == (here, {(0, 0): (30, 50)}), context
            assert found.why, context
        elif row.replay_from and source is not None and (0, 0) in source and source[0, 0] in ((0, 60), (20, 50)):
            assert isinstance(found, Rebuild), context
            assert (found.start, found.ranges) == (None, {(0, 0): (20, 50)}), context
        else:
            assert isinstance(found, Lost), context
            assert isinstance(found.error, HistoryLost), context
            assert "rewind reset" in found.error.command, context


@pytest.mark.parametrize("database", DATABASES, ids=str)
@pytest.mark.parametrize("in_task", [True, False])
def test_without_a_pointer(database: Database, in_task: bool) -> None:
    found = plan(None, Local(database), in_task=in_task)
    if isinstance(database, At) and database.commit is not None:
        assert isinstance(found, Ahead)
        assert database.commit.name in found.why
    else:
        assert found == Start()


def test_the_ordinary_case() -> None:
    found = plan(POINTER, Local(At(C), frozenset({D})))
    assert found == Advance((Step(D, True),))


def test_a_file_that_is_here_is_not_fetched() -> None:
    found = plan(POINTER, Local(At(B), frozenset({D})), Remote((STEPS[C], STEPS[D])))
    assert found == Advance((Step(C, False), Step(D, True)))


def test_the_first_commit_applies_to_an_empty_database() -> None:
    first = Pointer(0, A, None, 1, "digest", [], {}, "")
    assert plan(first, Local(At(None), frozenset({A}))) == Advance((Step(A, True),))
    assert isinstance(plan(first, Local(Nothing(), frozenset({A}))), Missing)


def test_a_lineage_that_does_not_fall_is_not_walked_for_ever() -> None:
    loop = (offer(D, C, False), offer(C, D, False))
    assert isinstance(plan(POINTER, Local(At(A)), Remote(loop)), Missing)


@pytest.mark.parametrize(
    ("database", "words"),
    [
        (Nothing(), "no local state"),
        (Unreadable("checksum mismatch in 000012.sst"), "checksum mismatch in 000012.sst"),
        (At(C), "staged file"),
        (At(Y), "another time or lineage"),
        (At(None), "no commit"),
    ],
)
def test_the_reason_is_said(database: Database, words: str) -> None:
    found = plan(POINTER, Local(database))
    assert isinstance(found, Missing)
    assert words in found.why


def test_ranges_come_from_the_record() -> None:
    row = CommitRecord(
        shard=0,
        commit=D,
        parent=C,
        time_ms=0,
        positions=[(0, 0, Position(50, 9, 9)), (0, 1, Position(30, 9, 9)), (1, 0, Position(5, 9, 9))],
        bounds={},
        replay_from=[(0, 0, 20), (0, 1, 30)],
    )
    assert replay_ranges(row) == {(0, 0): (20, 50)}


def test_only_what_came_since_is_replayed() -> None:
    row = CommitRecord(
        shard=0,
        commit=D,
        parent=C,
        time_ms=0,
        positions=[(0, p, Position(50, 9, 9)) for p in range(4)],
        bounds={},
        replay_from=[(0, 0, 20), (0, 1, 45), (0, 2, 20), (0, 3, 20)],
    )
    since = ranges_since(row, {(0, 0): 30, (0, 1): 30, (0, 2): 50})
    assert since == {(0, 0): (30, 50), (0, 1): (45, 50), (0, 3): (20, 50)}, "partition 3 is new since then"


def test_missing_offsets_are_named() -> None:
    ranges = {(0, 0): (20, 50), (0, 1): (5, 6), (0, 2): (1, 9)}
    said = missing_offsets(ranges, {(0, 0): (25, 45), (0, 1): (0, 6)})
    assert said == [
        "stream 0 partition 0: offsets from 20 wanted, the earliest is 25",
        "stream 0 partition 0: offsets to 49 wanted, the source ends before 45",
        "stream 0 partition 2: offsets 1 to 8 wanted, the partition is gone",
    ]
    assert missing_offsets(ranges, {(0, 0): (20, 50), (0, 1): (5, 6), (0, 2): (0, 100)}) == []
    assert missing_offsets({(0, 2): (1, 9)}, {}, {0: "sales"}) == [
        "sales partition 2: offsets 1 to 8 wanted, the partition is gone"
    ]
