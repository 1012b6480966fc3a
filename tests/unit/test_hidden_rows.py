"""What bounds hide lies in the database for some commits: nobody counts it, nobody misses what goes with it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from backend import median, policies, session, tumbling
from backend.batch import MESSAGE_FIELDS, NO_TIME, Position
from backend.rocks import RocksStore
from backend.store.protocol import Changes, Region, region_range
from backend.store.workspace import Workspace
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.pointer import read_commit_row
from recovery.commit.shard_directory import ShardDirectory
from recovery.inspect.verify import _database
from recovery.jobs import ShardJob
from recovery.restore.open_shard import RECLAIM_EVERY
from recovery.restore.prove import check_messages
from recovery.share import ShardInput

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64())])
STEP_MS = 10_000


@pytest.mark.parametrize("window", [tumbling("10 seconds"), session("2 seconds")], ids=["tumbling", "session"])
def test_proof_and_verify_look_above_the_bounds(tmp_path: Path, window) -> None:
    spec = window_spec(
        window, SCHEMA, {"m": median("x")}, keys=["key"], retention="10 seconds", max_ahead=None,
        policies=policies(late="off"),
    )  # fmt: skip
    operator = WindowOperator(spec)
    fields = tuple(SCHEMA.field(name) for name in operator.input_fields)
    job = ShardJob("hidden", 0, tmp_path / "local", operator, fields, open_changelog(str(tmp_path / "log")))
    pointer, newest, hid = None, NO_TIME, 0
    for version in range(RECLAIM_EVERY + 3):
        at = version * STEP_MS
        rows = [
            {"_stream": 0, "_partition": 0, "_offset": version * 2 + n, "_time": at + n, "_before": newest,
             "key": f"k{n}", "x": n}
            for n in range(2)
        ]  # fmt: skip
        newest = at + 1
        table = pa.Table.from_pylist(rows, pa.schema([*MESSAGE_FIELDS, *fields]))
        given = ShardInput(version, table, {(0, 0): Position(version * 2 + 2, newest, version)})
        pointer = run_attempt(job, pointer, version, lambda _, it=given: it).pointer
        generation = ShardDirectory(job.local_dir, job.query_id, job.shard).current()
        with RocksStore.open(generation.database, read_only=True) as store:
            row = read_commit_row(store)
            if row is None:
                continue
            hidden = sum(len(store.scan_arrays(region_range(at)[0], bound)[0]) for at, bound in row.bounds.items())
            hid = max(hid, hidden)
            proofs = list(operator.proofs(Workspace(store, row.bounds)))
            assert proofs
            assert check_messages(store, row, proofs) == []
        _, found = _database(generation.database, "shard 0", lambda _: None, "")
        assert {finding.level for finding in found} == {"sound"}, found
    assert hid >= 4, "nothing was hidden for long: the test looks at nothing"
    if window.kind == "session":
        with RocksStore.open(generation.database) as store:
            message = store.scan_arrays(*region_range(Region.MESSAGES))[0][-1]
            store.write(Changes([message], [None]))
        _, found = _database(generation.database, "shard 0", lambda _: None, "")
        assert "index" in {finding.check for finding in found if finding.level == "problem"}
