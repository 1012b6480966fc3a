"""The hunt of tests/model/combining.py, small."""

from collections import Counter

import pytest

from tests.model import combining


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.slow
def test_combined_rows_give_what_messages_one_by_one_give(share: float) -> None:
    met: Counter[str] = Counter()
    with combining.counting_refused(met):
        for seed in range(25):
            combining.one(seed, share, met)
    assert met["refused"] > 100
    if share == 1.0:
        assert met["refused whole"] > 10
        assert met["parted by an end"] > 50
    if share == 0.0:
        assert met["combined rows"] == 0
