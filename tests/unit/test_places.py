"""Directories under other names: outputs, source and state that meet in one are refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.places import check_apart, check_usable, is_within, real_place
from backend.sinks.parquet import ParquetSink
from backend.spark.session.jvm import check_same_files
from recovery.changelog import check_changelog
from recovery.files import check_place, open_files
from tests.unit.test_spark_settings import Session


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a directory with `w`, `x`, a link `link` to `w`, and one beside it, `up`, to the directory itself."""
    for name in ("w", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "w")
    (tmp_path / "up").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAME = [
    "w",
    "./w",
    "w/",
    "x/../w",
    "link",
    "link/",
    "up/w",
    "{}/w",
    "file:{}/w",
    "file://{}/w",
    "{}/x/../link",
    "//{}/w",
]
NESTED = ["w/errors", "link/errors", "x/../w/a/b", "file:{}/w/errors", "up/link/e"]


@pytest.mark.parametrize("name", SAME + NESTED)
def test_errors_that_meet_results_under_another_name_are_refused(work: Path, name: str) -> None:
    given = name.format(work)
    for results, errors in ((str(work / "w"), given), (given, str(work / "w"))):
        with pytest.raises(ValueError, match="another directory") as caught:
            ParquetSink(results, errors)
        assert "results=" in str(caught.value)
        assert "errors=" in str(caught.value)
    assert sorted(path.name for path in work.iterdir()) == ["link", "up", "w", "x"], "nothing was made"
    assert not any((work / "w").iterdir())


@pytest.mark.parametrize("name", ["x", "w-errors", "wx", "{}/x/w", "file:{}/x", "not/there/yet"])
def test_directories_that_are_apart_are_taken(work: Path, name: str) -> None:
    assert set(ParquetSink("w", name.format(work)).places()) == {"results", "errors"}


def test_a_directory_that_is_not_there_yet_is_known_by_its_place(work: Path) -> None:
    with pytest.raises(ValueError, match="errors="):
        ParquetSink("new", "x/../new")
    with pytest.raises(ValueError, match="lies inside"):
        ParquetSink("up/new", "new/errors")


@pytest.mark.parametrize(
    ("one", "other", "inside"),
    [
        ("s3://b/w", "s3a://b/x/../w/", True),
        ("s3://b/w/errors", "s3a://b/w", True),
        ("s3://b/w2", "s3://b/w", False),
        ("s3://c/w", "s3://b/w", False),
        ("memory://w", "/w", False),
        ("gs://b/w", "gcs://b", True),
    ],
)
def test_places_on_object_stores(one: str, other: str, inside: bool) -> None:
    assert is_within(real_place(one), real_place(other)) is inside


@pytest.mark.parametrize("place", ["hdfs:/data/c", "s3:/b/c", "s3a:/b/c", "gs:b/x", "kafka:/host:1/topic", "a:b"])
def test_what_spark_would_take_for_a_uri_is_no_path(place: str) -> None:
    """Spark's files would lie on one filesystem and ours in a directory below wherever each process stands."""
    for take in (lambda: check_place(place, "checkpoint"), lambda: check_changelog(place), lambda: open_files(place)):
        with pytest.raises(ValueError, match=r"(checkpoint=|changelog=|location ).*allowed are .*a path that"):
            take()
    assert check_place(f"./{place}", "checkpoint").endswith(place)


def test_a_path_is_taken_only_where_spark_takes_it_for_a_local_one() -> None:
    local, cluster = Session(), Session(files="hdfs", **{"fs.defaultFS": "hdfs://name:8020/"})
    for session, place in ((local, "/data/c"), (cluster, "file:/data/c"), (cluster, "hdfs://name/c")):
        check_same_files(session, place)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"allowed are hdfs://name:8020/data/c and file:///data/c"):
        check_same_files(cluster, "/data/c")  # type: ignore[arg-type]


def test_which_may_lie_inside_which_is_said_by_the_caller(work: Path) -> None:
    places = [("results", "x/out"), ("local_dir", "x")]
    with pytest.raises(ValueError, match="results='x/out': lies inside local_dir='x'"):
        check_apart(places)
    check_apart(places, inside={("results", "local_dir")})
    with pytest.raises(ValueError, match="is the directory of"):
        check_apart([("results", "link"), ("local_dir", "w")], inside={("results", "local_dir")})
    check_apart([("archive", "w"), ("archive", "w/t"), ("checkpoint", "x")])


@pytest.mark.parametrize("made", [["rewind/manifest.json"], ["metadata", "offsets/0", "commits/0"]])
def test_another_query_s_checkpoint_is_no_place_for_anything(work: Path, made: list[str]) -> None:
    """A reset of this query with its outputs would delete the other's checkpoint."""
    other = work / "w"
    for name in made:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).touch()
    for option in ("results", "errors", "local_dir", "checkpoint"):
        with pytest.raises(ValueError, match=f"^{option}='x/../w': is the checkpoint of another query"):
            check_usable([(option, "x/../w")], str(work / "x"))
        with pytest.raises(ValueError, match=f"^{option}='link/a/b': lies in the checkpoint of another query"):
            check_usable([(option, "link/a/b")], str(work / "x"))
    check_usable([("checkpoint", "w"), ("changelog", "w/rewind/changelog"), ("results", "x/w")], str(work / "w"))
    check_usable([("results", "s3://bucket/w")], str(work / "x"))


def test_a_file_where_a_directory_would_be_is_named_with_the_option(work: Path) -> None:
    (work / "file").touch()
    (work / "gone").symlink_to(work / "nowhere")
    for given in ("file", "file/a/b", f"file:{work}/x/../file"):
        with pytest.raises(ValueError, match=f"^changelog='{given}': .*/file is a file: allowed is a directory"):
            check_usable([("changelog", given)], str(work / "x"))
    check_usable([("changelog", "gone"), ("local_dir", "x/new")], str(work / "x"))


@pytest.mark.parametrize("name", ["file", "file/checkpoint", "file:{}/file"])
def test_a_file_is_no_directory(work: Path, name: str) -> None:
    (work / "file").touch()
    with pytest.raises(ValueError, match="file is a file: allowed is a directory"):
        open_files(name.format(work))
