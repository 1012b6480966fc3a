"""Which module runs in which process, and in what order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

GROUPS = {
    "all": ("not long", ("tests",), 60.0),
    "long": ("long", ("tests",), 180.0),
    "fast": ("not long and not slow", ("tests/unit", "tests/model"), 10.0),
}
"""Name of a group -> pytest's expression of marks, paths, and the limit of a whole run in minutes."""

DURATIONS = Path("tests/runner/durations.txt")


def module_of(test: str) -> str:
    """Return the path of a test's module.

    >>> module_of("tests/unit/test_keys.py::test_order[a]")
    'tests/unit/test_keys.py'
    """
    return test.partition("::")[0]


@dataclass(frozen=True)
class Unit:
    """What one process runs.

    Attributes:
        name: Of its files in the results directory.
        modules: Paths of its modules.
        tests: Ids of its tests.
    """

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def subject(self) -> str:
        """How it is called in output: its module's path where it has only one."""
        return self.modules[0] if len(self.modules) == 1 else self.name

    def part(self, modules: Iterable[str]) -> Unit:
        """Return the unit of some of its modules, for a second try."""
        kept = tuple(modules)
        name = kept[0].removesuffix(".py").replace("/", ".") if len(kept) == 1 else self.name
        return Unit(name, kept, tuple(test for test in self.tests if module_of(test) in kept))


SHARED, GENTLE, ALONE = ROOMS = ("shared", "gentle", "alone")
"""Where a module runs: with others that start neither JVM nor broker; with others that use one Spark, and one
broker, and do nothing to them; in a process of its own. A module is in the last of its tests' rooms.

A JVM costs 20 to 30 s of a busy core by its first micro-batches: classes are loaded and compiled, workers import.
"""


def room_of(marks: Collection[str]) -> str:
    """Return the room of a test with these marks."""
    if not {"spark", "kafka"}.intersection(marks):
        return SHARED
    return GENTLE if "gentle" in marks else ALONE


def plan(tests: Mapping[str, str], durations: Mapping[str, float], lanes: int) -> list[Unit]:
    """Return the processes in the order of their starts: those of unknown duration, then the longest first.

    Args:
        tests: Id -> room. Modules that share one do so in a process per lane, of about the same length.
        durations: Module -> seconds that it took last.
        lanes: How many processes run at a time.
    """
    everything = Unit(SHARED, (), tuple(tests))
    rooms: dict[str, str] = {}
    for test, room in tests.items():
        module = module_of(test)
        rooms[module] = max(rooms.get(module, SHARED), room, key=ROOMS.index)
    units = [
        (durations.get(module, float("inf")), everything.part([module])) for module in rooms if rooms[module] == ALONE
    ]
    for room in (SHARED, GENTLE):
        bins: list[list[str]] = [[] for _ in range(lanes)]
        loads = [0.0] * lanes
        for module in sorted(
            (name for name in rooms if rooms[name] == room), key=lambda name: -durations.get(name, 1.0)
        ):
            least = loads.index(min(loads))
            bins[least].append(module)
            loads[least] += durations.get(module, 1.0)
        for number, (load, modules) in enumerate(zip(loads, bins, strict=True), start=1):
            if modules:
                together = everything.part(sorted(modules))
                units.append((load, Unit(f"{room}-{number}", together.modules, together.tests)))
    return [unit for _, unit in sorted(units, key=lambda one: -one[0])]


def read_durations(path: Path) -> dict[str, float]:
    """Read lines of seconds and a module; without the file nothing is known."""
    rows = (line.split(maxsplit=1) for line in path.read_text().splitlines()) if path.exists() else iter(())
    return {module: float(seconds) for seconds, module in rows}


def write_durations(path: Path, durations: Mapping[str, float]) -> None:
    """Write what `read_durations` reads, sorted by module."""
    path.write_text("".join(f"{seconds:.1f} {module}\n" for module, seconds in sorted(durations.items())))
