"""A process that stages and confirms is killed with SIGKILL, anywhere: the store is at one whole commit or the next."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend.errors import StateCorrupted
from backend.rocks import RocksStore
from backend.rocks.parts import part_lengths
from backend.store.bounds import reclaim, stored_bounds
from backend.store.protocol import Staged
from backend.store.staging import file_digest

WRITER = """
import sys
from pathlib import Path
from backend.store.bounds import reclaim, stored_bounds
from backend.rocks import RocksStore, files
from backend.store.protocol import Changes

home, number, files.PART_BYTES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
while True:
    number += 1
    with RocksStore.open(home / "db", wait_s=5) as store:
        reclaim(store, stored_bounds(store))
        version = number.to_bytes(8, "big")
        keys = [bytes([region]) + index.to_bytes(4, "big") for region in (1, 4) for index in range(2000)]
        keys += [b"\\x02" + version]
        values = [version * 8] * len(keys)
        rows = sorted(zip([b"\\x00commit", *keys], [version, *values]))
        changes = Changes([key for key, _ in rows], [value for _, value in rows], {2: b"\\x02" + version})
        path = home / f"{number}.sst"
        for old in [path, *home.glob(f".{number}.sst.*")]:
            old.unlink(missing_ok=True)
        staged = store.stage(changes, path)
        print("staged", number, staged.length, staged.digest, flush=True)
        store.confirm(staged)
        print("confirmed", number, flush=True)
"""


def run_and_kill(home: Path, number: int, lines: int, delay_s: float, part_bytes: int) -> list[list[str]]:
    """Let the writer print some lines, then a little longer, and kill it; give all it printed."""
    command = [sys.executable, "-c", WRITER, str(home), str(number), str(part_bytes)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(lines)]
    time.sleep(delay_s)
    writer.kill()
    said += writer.stdout.readlines()
    writer.wait()
    assert writer.returncode == -9
    return [line.split() for line in said if line.endswith("\n")]


@pytest.mark.parametrize("part_bytes", [2**60, 1], ids=["one SST", "parts"])
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_leaves_a_whole_commit(tmp_path: Path, seed: int, part_bytes: int) -> None:
    chance = random.Random(seed)
    number = 0
    for _ in range(2):
        said = run_and_kill(tmp_path, number, chance.randint(1, 6), chance.uniform(0, 0.03), part_bytes)
        confirmed = max((int(line[1]) for line in said if line[0] == "confirmed"), default=number)
        staged = {
            int(line[1]): Staged(tmp_path / f"{line[1]}.sst", int(line[2]), line[3], 0)
            for line in said
            if line[0] == "staged"
        }
        with RocksStore.open(tmp_path / "db", wait_s=5) as store:
            number = int.from_bytes(store.get(b"\x00commit") or b"\x00", "big")
            assert number in (confirmed, confirmed + 1)
            whole(store, number)
            lengths = [len(part_lengths(one.path)) for one in staged.values()]
            assert set(lengths) == {3 if part_bytes == 1 else 0}
            following = staged.get(number + 1)
            if following is not None:  # staged, said so, and not confirmed: the next attempt's to take
                assert file_digest(following.path) == (following.length, following.digest)
                store.confirm(following)
                number += 1
                whole(store, number)
        half = [path for path in tmp_path.glob("*.sst") if int(path.stem) > number]
        for path in half:  # written, but nobody knows its digest
            with RocksStore.open(tmp_path / "db") as store, pytest.raises(StateCorrupted):
                store.confirm(Staged(path, path.stat().st_size + 1, "0" * 32, 0))


def whole(store: RocksStore, number: int) -> None:
    """Check that every row is of one commit, and that its bound came with it."""
    version = number.to_bytes(8, "big")
    for region in (1, 4):
        keys, values = store.scan_arrays(bytes([region]), bytes([region + 1]))
        assert len(keys) == (2000 if number else 0)
        assert set(values) <= {version * 8}
    assert stored_bounds(store) == ({2: b"\x02" + version} if number else {})
    reclaim(store, stored_bounds(store))
    assert store.scan_arrays(b"\x02", b"\x03")[0] == ([b"\x02" + version] if number else [])
