"""README.md and docs/: snippets are run, links lead somewhere, what the code says too is what it says.

`make lint` builds the site, which finds pages without a place in `nav`.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pyarrow as pa
import pytest

import backend
from backend import RewindError, WindowStore, archive, count, errors, stream, tumbling
from backend.steps import schema_after
from recovery.drill.scenarios import CATALOGUE
from tests.support import options_page
from tests.support.snippets import ROOT, run, snippets

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
RUNNERS = (
    *("tests/unit/test_docs.py", "tests/spark/test_spark_snippets.py", "tests/spark/test_explain.py"),
    "tests/kafka/test_kafka_snippets.py",
)
_LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)\"\s]+)")


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_snippet_is_run() -> None:
    said = "".join((ROOT / runner).read_text() for runner in RUNNERS)
    assert [name for name in snippets() if f'"{name}"' not in said] == []
    assert len(snippets()) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        place, _, anchor = link.partition("#")
        assert "://" not in link, link
        target = page if not place else (page.parent / place).resolve()
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, more = set(), {ROOT / "README.md"}
    while more:
        page = more.pop()
        reached.add(page)
        links = {(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(page.read_text())}
        more |= {link for link in links if link.suffix == ".md"} - reached
    assert set(PAGES) <= reached


def test_files_with_a_name_are_in_the_tutorial_alone() -> None:
    """They are written and run by tests/spark/test_tutorial.py."""
    found = {page.name for page in PAGES if re.search(r"^```python .*title=", page.read_text(), re.M)}
    assert found == {"tutorial.md"}


def test_every_folder_of_code_has_its_place_in_the_page_on_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:backend|recovery)[\w/]*)`", text))
    folders = {
        str(path.parent.relative_to(ROOT))
        for top in ("backend", "recovery")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert folders - named == set()
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == 5 and "`" in cells[3]:
            house = re.findall(r"`(backend|recovery)", cells[1])[0]
            for name in re.findall(r"`([\w/.]+)`", cells[3]):
                assert (ROOT / house / name).is_file(), line


def test_the_options_are_those_of_the_code() -> None:
    text = options_page.PAGE.read_text()
    assert options_page.page(text) == text, "run python -m tests.support.options_page"
    assert doctest.testmod(options_page).failed == 0


def test_every_error_is_on_its_page_and_named_there_by_its_message() -> None:
    page = ROOT / "docs" / "errors.md"
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RewindError)}
    kinds.remove(RewindError)
    heads = re.findall(r"^### (\w+)$", page.read_text(), re.M)
    assert sorted(heads) == sorted(kind.__name__ for kind in kinds)
    for kind in kinds:
        if kind.usual_command:
            assert str(kind("what")).endswith(f"next: {kind.usual_command}")
            continue
        page_of, _, anchor = str(kind("what")).rpartition("next: see ")[2].partition("#")
        assert ROOT / page_of == page and anchor in _anchors(page), kind
        assert "docs/" not in str(kind("what", command="rewind verify c"))


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    said = re.findall(r"^::: [\w.]+\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    kinds = {name for name in backend.__all__ if hasattr(errors, name)}
    assert set(backend.__all__) - kinds == set(said) - {"Stream", "WindowedStream", "Pipeline", "ProcessContext"}
    assert len(said) == len(set(said))


def test_every_scenario_of_a_drill_is_on_its_page() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?)(?: \(`\w+`\))? \|$", (ROOT / "docs" / "recovery.md").read_text(), re.M)
    assert rows == [(one.name, one.text) for one in CATALOGUE]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_windows_without_spark() -> None:
    context = run("docs/without-spark.md:1", {})["context"]
    assert context.get_result() == []  # flushed
    assert [view.start for view in context.get_windows(0, 120_000)] == [0, 60_000]


def test_steps_before_a_window() -> None:
    [side] = run("docs/steps.md:1", {})["job"].streams
    fields = pa.schema([("user", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    assert schema_after(side.steps, fields).names == ["who", "twice", "at"]


def test_joins_without_spark() -> None:
    both = run("docs/without-spark.md:2", {})["both"]
    [row] = both.get_result()
    assert {"left_time": 1_000, "right_time": 9_000, "id": 3, "value": 5, "cost": 0}.items() <= row.items()


def test_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("docs/stores.md:2", {})
    with WindowStore.open("state/visits", retention="1 day", window_size="1 hour", grace="10 minutes") as visits:
        assert list(visits.fetch("anna")) == [(1_767_225_600_000, 3)]


def test_a_job_without_spark(tmp_path: Path) -> None:
    job = (
        stream(archive("nowhere", format="raw"), event_time="at")
        .window(tumbling("1 hour"), retention="1 hour")
        .aggregate(n=count())
    )
    run("docs/testing.md:1", {"job": job})["test_my_windows"](tmp_path)


@pytest.mark.slow
def test_sinks_into_tables(tmp_path: Path) -> None:
    places = {
        "postgresql+psycopg://host/database": "sqlite:///windows.db",
        "//data/catalog.db": "/:memory:",
        "/data/warehouse": str(tmp_path),
    }
    sinks = run("docs/sinks.md:2", {}, places)
    assert [sinks[name].describe()["kind"] for name in ("rows", "table")] == ["sql", "iceberg"]
