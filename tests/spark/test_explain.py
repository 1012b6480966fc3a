"""`explain` says what a job will do, and starts nothing; docs/operation.md shows what it prints."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from backend import archive, count, hopping, join, stream, value_state
from backend.sources.archive_files import write_archive
from bench.data import START_MS, TIME, topic_rows, typed
from tests.support.snippets import ROOT, run

pytestmark = [pytest.mark.spark, pytest.mark.gentle]


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("archive") / "orders"
    value = typed(shop=pa.array(["a"]), at=pa.array([START_MS], TIME), price=pa.array([1.0]))
    write_archive(path, topic_rows(0, 0, pa.array([START_MS]).to_numpy(), value), rows_per_file=1, row_group_rows=1)
    return archive(str(path), value="shop string, at timestamp, price double", format="typed")


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    return {name.strip(): text.strip() for name, text in lines}


def test_what_it_says_of_windows_is_what_the_page_shows(
    spark: Any, orders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run("docs/operation.md:1", {"spark": spark}, {"data/orders": orders.path})
    printed = capsys.readouterr().out.rstrip().replace("archive t,", "archive orders,")
    assert f"```text\n{printed}\n```" in (ROOT / "docs" / "operation.md").read_text()
    assert spark.streams.active == []


def test_what_it_says_of_others(spark: Any, orders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sales = stream(orders, event_time="at", key="shop")
    sales.window(hopping("1 hour", "15 minutes"), retention="2 hours").aggregate(n=count()).explain(spark)
    light = said(capsys)
    assert light["combined"].startswith("messages that all windows treat alike")
    assert light["restore"] == "the changelog; no message is read again"
    other = stream(orders, event_time="at")
    join(other, other, on="shop", within="5 minutes", left_retention="1 hour", right_retention="2 hours").explain(spark)
    joined = said(capsys)
    assert joined["left source"] == "archive t, read in the Python workers"
    assert joined["join"] == "inner on shop, 5 minutes before to 5 minutes after"
    assert joined["state"] == "the messages of both sides: left 1 hour, right 2 hours"
    assert joined["restore"] == "the changelog, and the messages in retention from left, right"
    schema = pa.schema([pa.field("shop", pa.string())])
    sales.process(lambda messages, context: messages, stores=[value_state("seen")], result=schema).explain(spark)
    assert said(capsys)["state"] == "its stores: seen"


def test_a_bad_option_is_refused(spark: Any, orders: Any) -> None:
    job = stream(orders, event_time="at", key="shop").window(hopping(10, 5), retention="1 hour").aggregate(n=count())
    with pytest.raises(ValueError, match="shard=3: not an option"):
        job.explain(spark, shard=3)
    with pytest.raises(ValueError, match="shards=0: must be an integer from 1 to 4096"):
        job.explain(spark, shards=0)
