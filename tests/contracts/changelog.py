"""The contract of a changelog: inherit it, give it a fixture `make`, and it runs over that implementation."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from backend.batch import Position
from backend.errors import ChangelogDamaged, ManifestMismatch
from backend.store.protocol import Changes
from recovery.changelog import Changelog, History
from recovery.changelog.protocol import place_and_growth
from recovery.changelog.records import Kind
from recovery.commit.pointer import Commit, CommitRecord

Make = Callable[[], Changelog]
Own = Callable[[str], Changelog]
"""Gives the changelog over the same place as a query has it, told the query."""


def commit(version: int, mark: str = "a") -> Commit:
    return Commit(version, f"{mark * 32}")


def record(
    version: int,
    parent: Commit | None = None,
    *,
    mark: str = "a",
    shard: int = 0,
    bounds: dict[int, bytes] | None = None,
    ancestors: list[Commit] | None = None,
) -> CommitRecord:
    return CommitRecord(
        shard=shard,
        commit=commit(version, mark),
        parent=parent,
        ancestors=ancestors if ancestors is not None else ([parent] if parent else []),
        time_ms=1_000 + version,
        positions=[(0, 0, Position(version * 10, version, 7))],
        bounds=bounds or {},
        replay_from=[(0, 0, version)],
        rejected=[(0, 0, 3)],
        message_count=version,
        message_digest=2**63 + version,
    )


def changes(rows: dict[bytes, bytes | None]) -> Changes:
    keys = sorted(rows)
    return Changes(keys, [rows[key] for key in keys])


def as_dict(history: History) -> dict[bytes, bytes]:
    return dict(zip(history.keys.to_pylist(), history.values.to_pylist(), strict=True))


class ChangelogContract:
    """Every test of the contract; `make` gives a changelog over the same place each time it is called, `own` a query's.

    `max_deltas=4, min_base_bytes=10_000`, and at least 13 shards.
    """

    cuts_orphans = True
    """False for a log that can be cut at one end only."""

    def test_last_value_per_key_wins_and_deletes_delete(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1", b"\x03b": b"1", b"\x04c": b""}))
        log.append(record(1, commit(0)), changes({b"\x03a": None, b"\x03b": b"2", b"\x40z": b"\x00"}))
        history = make().read(0, commit(1))
        assert as_dict(history) == {b"\x03b": b"2", b"\x04c": b"", b"\x40z": b"\x00"}
        assert history.record == record(1, commit(0))
        assert history.keys.to_pylist() == [b"\x03b", b"\x04c", b"\x40z"]
        assert as_dict(make().read(0, commit(0))) == {b"\x03a": b"1", b"\x03b": b"1", b"\x04c": b""}

    def test_a_commits_record_is_had_without_its_rows(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append(record(1, commit(0)), changes({b"\x03b": b"1"}))
        log.append_base(record(2, commit(1)), [(b"\x03a", b"1")])  # its delta was pruned
        for version, parent in enumerate((None, commit(0), commit(1))):
            assert make().record(0, commit(version)) == record(version, parent)
        with pytest.raises(ChangelogDamaged, match="missing"):
            make().record(0, commit(3))

    def test_a_deleted_key_can_come_back(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append(record(1, commit(0)), changes({b"\x03a": None}))
        log.append(record(2, commit(1)), changes({b"\x03a": b"3"}))
        assert as_dict(log.read(0, commit(1))) == {}
        assert as_dict(log.read(0, commit(2))) == {b"\x03a": b"3"}

    def test_orphans_do_not_count(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append(record(1, commit(0), mark="b"), changes({b"\x03a": b"orphan", b"\x03x": b"orphan"}))
        log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
        log.append(record(2, commit(1, "b"), mark="b"), changes({b"\x03y": b"orphan"}))
        assert as_dict(log.read(0, commit(1))) == {b"\x03a": b"1", b"\x03b": b"2"}

    def test_messages_and_the_commit_row_stay_out(self, make: Make) -> None:
        log = make()
        rows = {b"\x00commit": b"row", b"\x01m": b"message", b"\x02i": b"", b"\x03w": b"window", b"\xfeu": b"user"}
        log.append(record(0), changes(rows))
        assert as_dict(log.read(0, commit(0))) == {b"\x03w": b"window", b"\xfeu": b"user"}
        log.append(record(1, commit(0)), changes({b"\x01m": b"message"}))
        log.append_base(record(1, commit(0)), sorted((key, value) for key, value in rows.items()))
        assert as_dict(log.read(0, commit(1))) == {b"\x03w": b"window", b"\xfeu": b"user"}

    def test_bounds_hide_what_is_below_in_their_region_only(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03" + bytes([i]): b"v" for i in range(4)} | {b"\x04\x00": b"kept"}))
        log.append(record(1, commit(0), bounds={3: b"\x03\x02"}), changes({b"\x40a": b"1"}))
        assert as_dict(log.read(0, commit(1))) == {
            b"\x03\x02": b"v",  # the bound itself is not below the bound
            b"\x03\x03": b"v",
            b"\x04\x00": b"kept",
            b"\x40a": b"1",
        }

    def test_a_base_ends_the_walk(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
        log.append_base(record(1, commit(0)), [(b"\x03a", b"1"), (b"\x03b", b"2")])
        log.append(record(2, commit(1)), changes({b"\x03a": None}))
        log.prune(0, [commit(2)])
        assert as_dict(log.read(0, commit(2))) == {b"\x03b": b"2"}
        assert [(entry.kind, entry.commit.version) for entry in log.entries(0)] == [(Kind.BASE, 1), (Kind.DELTA, 2)]

    def test_an_empty_micro_batch_is_a_record_too(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        logged = log.append(record(1, commit(0)), changes({}))
        assert (place_and_growth(logged.location)[0], logged.length) in {
            (entry.location, entry.length) for entry in log.entries(0)
        }
        history = log.read(0, commit(1))
        assert as_dict(history) == {b"\x03a": b"1"}
        assert history.record.commit == commit(1)
        empty = make()
        empty.append(record(0, shard=5), changes({}))
        assert empty.read(5, commit(0)).rows == 0

    def test_shards_are_apart(self, make: Make) -> None:
        log = make()
        log.append(record(0, shard=1), changes({b"\x03a": b"one"}))
        log.append(record(0, shard=12), changes({b"\x03a": b"twelve"}))
        assert as_dict(log.read(1, commit(0))) == {b"\x03a": b"one"}
        assert as_dict(log.read(12, commit(0))) == {b"\x03a": b"twelve"}
        assert [shard for shard in range(13) if log.entries(shard)] == [1, 12]

    def test_the_same_delta_twice_is_one(self, make: Make) -> None:
        log = make()
        for _ in range(2):
            log.append(record(0), changes({b"\x03a": b"1"}))
        assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"1"}

    def test_prune_keeps_what_retained_commits_need(self, make: Make) -> None:
        log = make()
        ancestors: list[Commit] = []
        state: dict[bytes, bytes] = {}
        expected = {}
        for version in range(12):
            parent = ancestors[0] if ancestors else None
            row = record(version, parent, ancestors=ancestors[:3])
            key = b"\x03" + bytes([version % 5])
            state[key] = str(version).encode()
            log.append(row, changes({key: state[key]}))
            log.append(record(version, parent, mark="f", ancestors=ancestors[:3]), changes({b"\x03orphan": b"x"}))
            if version % 4 == 1:
                log.append_base(row, sorted(state.items()))
            expected[version] = dict(state)
            ancestors.insert(0, row.commit)
        keep = [commit(8), commit(11)]
        told = log.prune(0, keep, dry_run=True)
        assert as_dict(log.read(0, commit(0))) == expected[0], "a dry run deletes nothing"
        assert log.prune(0, keep) == told
        for version in (8, 9, 11):
            assert as_dict(log.read(0, commit(version))) == expected[version]
        left = {(entry.commit.version, entry.commit.uuid[0], entry.kind) for entry in log.entries(0)}
        # the base of 5 and what follows it; orphans above the oldest retained version may still be in flight
        want = {(5, "a", Kind.BASE), (9, "a", Kind.BASE)}
        want |= {(version, "a", Kind.DELTA) for version in (6, 7, 8, 9, 10, 11)}
        want |= {(version, "f", Kind.DELTA) for version in (9, 10, 11)}
        assert left == want if self.cuts_orphans else want <= left <= want | {(v, "f", Kind.DELTA) for v in (6, 7, 8)}

    def test_prune_without_retained_commits_deletes_nothing(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        assert log.prune(0, []) == []
        assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"1"}

    def test_a_base_is_wanted_after_enough_deltas(self, make: Make) -> None:
        log = make()
        parent = None
        wanted = []
        for version in range(5):
            row = record(version, parent)
            log.append(row, changes({b"\x03a": b"1"}))
            parent = row.commit
            wanted.append(make().wants_base(0, row.commit))
        assert wanted == [False, False, False, True, True]
        log.append_base(record(4, commit(3)), [(b"\x03a", b"1")])
        assert not log.wants_base(0, commit(4))
        assert not make().wants_base(0, commit(4))

    def test_a_pointer_tells_how_much_has_grown(self, make: Make) -> None:
        log = make()
        lengths: list[int] = []
        for version in range(7):
            row = record(version, commit(version - 1) if version else None)
            logged = log.append(row, changes({b"\x03a": b"%d" % version}))
            lengths.append(logged.length)
            growth = place_and_growth(logged.location)[1]
            assert growth is not None
            assert (growth.deltas, growth.delta_bytes) == (len(lengths), sum(lengths))
            assert (growth.base_bytes > 0) == (version > 2)
            assert make().wants_base(0, row.commit, logged.location) == (len(lengths) >= 4)
            if version == 2:
                log.append_base(row, [(b"\x03a", b"2")])
                lengths.clear()

    def test_a_base_is_wanted_when_deltas_outgrow_it(self, make: Make) -> None:
        log = make()
        noise = b"".join(
            uuid.uuid5(uuid.NAMESPACE_OID, str(i)).bytes for i in range(1000)
        )  # 16 kB that do not compress
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append_base(record(0), [(b"\x03a", b"1")])
        assert not log.wants_base(0, commit(0))
        log.append(record(1, commit(0)), changes({b"\x03b": noise}))
        assert log.wants_base(0, commit(1))

    def test_rows_of_a_base_must_rise(self, make: Make) -> None:
        log = make()
        with pytest.raises(ValueError, match="increasing"):
            log.append_base(record(0), [(b"\x03b", b"1"), (b"\x03a", b"1")])
        with pytest.raises(ValueError, match="increasing"):
            log.append_base(record(0), [(b"\x03a", b"1"), (b"\x03a", b"2")])
        assert list(log.entries(0)) == []

    def test_verify_of_a_sound_log_finds_nothing(self, make: Make) -> None:
        log = make()
        log.append(record(0), changes({b"\x03a": b"1"}))
        log.append(record(1, commit(0)), changes({b"\x03a": b"2"}))
        assert log.verify(0, commit(1)) == []

    # ------------------------------------------------------------------------------- whose it is, and what is left

    def test_a_second_query_is_refused_before_it_writes_anything(self, make: Make, own: Own) -> None:
        first, second = own("1" * 32), own("2" * 32)
        first.prepare(2, new=True)
        first.append(record(0), changes({b"\x03a": b"1"}))
        before = list(make().entries(0))
        with pytest.raises(ManifestMismatch, match=f"name query {'1' * 32}, this one is {'2' * 32}"):
            second.check(2, new=True)
        with pytest.raises(ManifestMismatch, match="changelog belongs to another query"):
            second.prepare(2, new=True)
        assert list(make().entries(0)) == before
        own("1" * 32).prepare(2)  # its own, again

    def test_the_owner_is_known_before_and_after_the_first_record_and_behind_the_cut(
        self, make: Make, own: Own
    ) -> None:
        first = own("1" * 32)
        first.prepare(2, new=True)
        with pytest.raises(ManifestMismatch):
            own("2" * 32).check(2, new=True)
        for version in range(6):
            row = record(version, commit(version - 1) if version else None)
            first.append(row, changes({b"\x03a": b"1"}))
            if version == 4:
                first.append_base(row, [(b"\x03a", b"1")])
        assert first.prune(0, [commit(5)])
        with pytest.raises(ManifestMismatch):
            own("2" * 32).check(2, new=True)
        first.check(2, new=False)

    def test_records_that_name_nobody_are_an_older_querys_own_and_no_new_ones(self, make: Make, own: Own) -> None:
        make().append(record(0), changes({b"\x03a": b"1"}))  # as release 0.1 wrote
        with pytest.raises(ManifestMismatch, match="another query"):
            own("1" * 32).prepare(2, new=True)
        own("1" * 32).prepare(2, new=False)
        with pytest.raises(ManifestMismatch):
            own("2" * 32).prepare(2, new=False)
        assert as_dict(own("1" * 32).read(0, commit(0))) == {b"\x03a": b"1"}

    def test_two_that_begin_at_the_same_time_never_both_go_on(self, make: Make, own: Own) -> None:
        begun = []
        for query in ("1" * 32, "2" * 32):
            log = own(query)
            with pytest.MonkeyPatch.context() as patch:  # both looked before either claimed
                real, looks = log.check, []
                patch.setattr(log, "check", lambda *a, real=real, looks=looks, **k: looks.append(1) or (
                    None if len(looks) == 1 else real(*a, **k)))  # fmt: skip
                try:
                    log.prepare(2, new=True)
                    begun.append(query)
                except ManifestMismatch:
                    pass
        assert begun in (["1" * 32], [])

    def test_pruning_stops_where_another_query_has_written(self, make: Make, own: Own) -> None:
        first = own("1" * 32)
        first.prepare(2, new=True)
        for version in range(3):
            row = record(version, commit(version - 1) if version else None)
            first.append(row, changes({b"\x03a": b"1"}))
        first.append_base(row, [(b"\x03a", b"1")])
        self.intrude(own("2" * 32))
        with pytest.raises(ManifestMismatch, match="2" * 32):
            own("1" * 32).prune(0, [commit(2)])
        assert as_dict(make().read(0, commit(1))) == {b"\x03a": b"1"}

    def test_a_lineage_that_is_there_is_not_lost(self, make: Make) -> None:
        log = make()
        where = {}
        for version in range(6):
            row = record(version, commit(version - 1) if version else None)
            where[version] = log.append(row, changes({b"\x03a": str(version).encode()})).location
            if version == 3:
                log.append_base(row, [(b"\x03a", b"3")])
        for version, location in where.items():
            for whole in (False, True):
                assert make().lost(0, commit(version), location, whole=whole) == ""
        log.prune(0, [commit(5)])
        assert make().lost(0, commit(5), where[5], whole=True) == ""
        assert make().lost(0, commit(3), where[3], whole=True) == "", "its base stands in for what is cut"
        assert make().lost(0, commit(2), where[2]), "what nobody retained is gone"

    def test_an_emptied_log_is_lost_until_a_base_stands_in_for_it(self, make: Make) -> None:
        log = make()
        parent = None
        for version in range(3):
            row = record(version, parent)
            location = log.append(row, changes({b"\x03a": str(version).encode()})).location
            parent = row.commit
        assert log.lost(0, commit(2), location) == ""
        self.empty(0)
        for changelog in (log, make()):
            for whole in (False, True):
                assert changelog.lost(0, commit(2), location, whole=whole)
        log.append_base(row, [(b"\x03a", b"2")])
        for changelog in (log, make()):
            assert changelog.lost(0, commit(2), location, whole=True) == ""
        logged = log.append(record(3, commit(2)), changes({b"\x03b": b"3"}))
        for changelog in (log, make()):
            assert changelog.lost(0, commit(3), logged.location, whole=True) == ""
            assert as_dict(changelog.read(0, commit(3))) == {b"\x03a": b"2", b"\x03b": b"3"}

    def test_nothing_is_lost_of_one_shard_when_another_ones_is(self, make: Make) -> None:
        log = make()
        one = log.append(record(0, shard=1), changes({b"\x03a": b"1"})).location
        log.append(record(0), changes({b"\x03a": b"1"}))
        self.empty(0)
        assert make().lost(1, commit(0), one, whole=True) == ""

    def intrude(self, other: Changelog) -> None:
        """Let another query write, though it would be refused: as a release that does not ask would."""
        raise NotImplementedError

    def empty(self, shard: int) -> None:
        """Take away everything that a shard's log has."""
        raise NotImplementedError
