"""Any tree of commits, with orphans, bases and pruning, reads back as a dict would."""

from __future__ import annotations

import uuid

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.store.protocol import Changes
from recovery.changelog import FileChangelog
from recovery.commit.pointer import MAX_ANCESTORS, Commit, CommitRecord

KEYS = st.tuples(st.sampled_from([0, 1, 2, 3, 4, 0x40]), st.binary(max_size=2)).map(lambda t: bytes([t[0]]) + t[1])
ROWS = st.dictionaries(KEYS, st.none() | st.binary(max_size=3), max_size=6)
STEPS = st.lists(
    st.tuples(st.integers(0, 3), ROWS, st.booleans(), st.none() | st.binary(min_size=1, max_size=1)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, keep_from=st.integers(0, 24))
def test_lineages_read_like_dicts(steps: list, keep_from: int) -> None:  # type: ignore[type-arg]
    log = FileChangelog(f"memory://model-{uuid.uuid4().hex}")
    nodes: list[tuple[CommitRecord, dict[bytes, bytes]]] = []
    for version, (back, drawn, base, bound) in enumerate(steps):
        parent, state = nodes[-1 - min(back, len(nodes) - 1)] if nodes else (None, {})  # type: ignore[var-annotated]
        bounds = dict(parent.bounds) if parent else {}
        if bound is not None:
            bounds[3] = max(bounds.get(3, b"\x03"), b"\x03" + bound)
        # writes below a bound are refused by the workspace
        rows = {key: value for key, value in drawn.items() if not (key[0] == 3 and key < bounds.get(3, b""))}
        record = CommitRecord(
            shard=0,
            commit=Commit(version, uuid.uuid4().hex),
            parent=parent.commit if parent else None,
            ancestors=[parent.commit, *parent.ancestors][: MAX_ANCESTORS if back else 2] if parent else [],
            time_ms=0,
            positions=[],
            bounds=bounds,
        )
        after = dict(state)
        for key, value in rows.items():
            if value is None:
                after.pop(key, None)
            else:
                after[key] = value
        after = {key: value for key, value in after.items() if not (key[0] == 3 and key < bounds.get(3, b""))}
        keys = sorted(rows)
        log.append(record, Changes(keys, [rows[key] for key in keys], bounds))
        if base:
            log.append_base(record, sorted(after.items()))
        nodes.append((record, after))

    def check(which: list[tuple[CommitRecord, dict[bytes, bytes]]]) -> None:
        for record, state in which:
            history = log.read(0, record.commit)
            want = {key: value for key, value in state.items() if key[0] > 2}  # 0, 1, 2: commit row and messages
            assert list(zip(history.keys.to_pylist(), history.values.to_pylist(), strict=True)) == sorted(want.items())
            assert history.record == record
            assert history.notes == ()

    check(nodes)
    kept = nodes[min(keep_from, len(nodes) - 1) :]
    log.prune(0, [record.commit for record, _ in kept])
    check(kept)
