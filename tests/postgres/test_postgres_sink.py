"""The SQL sink with PostgreSQL."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from backend.sinks import sql_sink
from tests.support.sink_story import MINUTE_MS
from tests.unit.test_table_sinks import Case, begun, brought, storm, two_writers


def case_of(url: str) -> Case:
    """Make a case in a schema of its own."""
    import sqlalchemy as sa

    engine = sa.create_engine(url, poolclass=sa.NullPool)
    schema = f"s{uuid.uuid4().hex}"
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {schema}"))

    def query(text: str) -> list[tuple[Any, ...]]:
        for name, table in (("results", "windows"), ("errors", "windows_errors")):
            text = text.replace(f"FROM {name}", f"FROM {schema}.{table}")
        text = text.replace("epoch_ms(window_start)", "CAST(extract(epoch FROM window_start) * 1000 AS BIGINT)")
        with engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(text)]

    return Case(lambda **options: sql_sink(url, "windows", schema=schema, **options), query, "\ufffd")


@pytest.mark.parametrize("mode", ["log", "newest"])
def test_no_row_comes_twice_and_none_is_missing_wherever_the_driver_dies(
    postgres: str, mode: str, tmp_path: Path
) -> None:
    """A hundred deaths where PostgreSQL is asked for, a few where it is only there."""
    many = os.environ.get("REWIND_POSTGRES")
    storm(case_of(postgres), tmp_path, mode, *((40, 100) if many else (5, 9)))


class Noon(BaseException):
    """The driver dies in the middle of a transaction."""


@pytest.mark.parametrize("statement", range(1, 5))
def test_a_transaction_that_the_driver_dies_in_leaves_nothing(postgres: str, statement: int, tmp_path: Path) -> None:
    import sqlalchemy as sa

    case = case_of(postgres)
    rows = [("full", at * MINUTE_MS, "JFK", at) for at in range(1200)]  # three statements of 500 each, and the record
    sink = begun(case, tmp_path, mode="newest")
    brought(sink, 0, ("full", 0, "JFK", 7))
    left = [statement]

    def dies(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Noon

    engine = sink._tables["results"]._engine
    sink._tables["results"].last()
    sa.event.listen(engine, "after_cursor_execute", dies)
    with pytest.raises(Noon):
        brought(sink, 1, *rows)
    assert [row[5] for row in case.results()] == [7]
    brought(begun(case, tmp_path, planned=1, mode="newest"), 1, *rows)
    assert sorted(row[5] for row in case.results()) == list(range(1200))


def test_of_two_writers_one_fails(postgres: str, tmp_path: Path) -> None:
    two_writers(case_of(postgres), tmp_path)
