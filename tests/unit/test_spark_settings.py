"""The settings of a user's session: one start at a time changes them, and puts them back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backend.spark.session.jvm import WORKER_TIME, give_workers_time
from backend.spark.session.settings import settings

SHARDS = "spark.sql.shuffle.partitions"
PATIENCE_S = 30


class Conf:
    """The settings of a session, as PySpark's `RuntimeConfig` gives them."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def get(self, name: str, *default: str | None) -> str | None:
        return self.values.get(name, *default) if default else self.values[name]

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def unset(self, name: str) -> None:
        del self.values[name]


class Session:
    def __init__(self) -> None:
        self.conf = Conf(**{"spark.sql.session.timeZone": "UTC", SHARDS: "200"})


def test_two_starts_side_by_side_see_their_own_settings_and_leave_the_users() -> None:
    spark: Any = Session()
    users = dict(spark.conf.values)
    first_is_in, first_may_go, second_is_in = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, str | None] = {}

    def first() -> None:
        with settings(spark, 3, 1024):
            first_is_in.set()
            assert first_may_go.wait(PATIENCE_S)
            seen["first"] = spark.conf.get(SHARDS)

    def second() -> None:
        assert first_is_in.wait(PATIENCE_S)
        with settings(spark, 5, 1024, few_rows=True):
            second_is_in.set()
            seen["second"] = spark.conf.get(SHARDS)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    assert not second_is_in.wait(0.2), "the first has not put back yet what it found"
    first_may_go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == {"first": "3", "second": "5"}
    assert spark.conf.values == users


@pytest.mark.parametrize(("said", "found"), [(None, "120s"), ("20s", "20s"), ("900s", "900s")])
def test_workers_get_time_to_connect_unless_the_user_has_said_how_long(said: str | None, found: str) -> None:
    values = {} if said is None else {WORKER_TIME[0]: said}
    conf = SimpleNamespace(contains=values.__contains__, set=values.__setitem__)
    spark: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf)))
    )
    give_workers_time(spark)
    assert values == {"spark.python.authenticate.socketTimeout": found}
