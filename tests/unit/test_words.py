"""One word for one thing: no identifier of the product has a word that the vocabulary has retired."""

from __future__ import annotations

import doctest

from tests.support import shape


def test_no_identifier_has_a_retired_word() -> None:
    found = {str(path.relative_to(shape.ROOT)): shape.retired(path.read_text()) for path in shape.modules()}
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


def test_they_are_found_wherever_a_name_can_stand() -> None:
    source = """
from a.facts import b as told_by
import held.x
class LaunchOf: kept: int
async def turns(package, *, opening=1): return package.story
with a as epochs: f(partials=1)
match a:
    case [*surveys, ladder]: pass
try: pass
except E as closing: pass
"""
    assert {word for _, word in shape.retired(source)} == set(shape.RETIRED) - {"launched"}


def test_a_librarys_word_and_the_fields_are_none() -> None:
    assert shape.retired("partial(f)\nend.leader_epoch\n_UNIX_EPOCH_DAY\nPackageNotFoundError\n") == []
    assert shape.retired("partial_of\nepoch\nturned\nkeeps\n") == [("epoch", "epoch"), ("partial_of", "partial")]


def test_its_examples() -> None:
    assert doctest.testmod(shape).failed == 0
