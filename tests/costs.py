"""Which tests are left to `make test-all` for what they cost, by processor seconds that `make costs` has measured.

A test function is an oracle, its cases repeat it. So the cheapest case of each is dear from `ONCE` seconds on only, the others from
`AGAIN` on; and a file whose tests are all dear keeps its cheapest one. What is marked as core is never left out, nor is a test that
failed when it was measured ever listed.
"""

import collections
import importlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

LIST = Path(__file__).parent / "costs.txt"
"""Processor seconds of the tests that cost `AGAIN` or more, children's included: a line each, with a tab before the test."""
ONCE, AGAIN = 0.5, 0.1
"""Seconds from which a test function is left out altogether, and from which a further case of it is."""
TOLD = 1.0
"""Seconds from which `make test` tells about a test that is not listed: what was 0.1 when it was measured is that on no machine."""
BUDGET = 300
"""Processor seconds of all tests of `make test`, two processes of which take 150: beyond them, lower `ONCE` or `AGAIN`, or a test."""
IMPORTED_BY_NEED = (
    "matplotlib.pyplot",
    "plotly.graph_objects",
    "scipy.optimize",
    "sklearn.datasets",
    "torch._dynamo",
    "transformers",
)
"""What would be part of the first measured test's cost that happens to need it."""


def listed() -> dict[str, float]:
    """Seconds by test."""
    lines = (line.split("\t") for line in LIST.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def left_out(names: Iterable[str], costs: Mapping[str, float]) -> set[str]:
    """Those of the tests of whole files, of which none is core, that are left to `make test-all`."""
    by_function, by_file = collections.defaultdict(list), collections.defaultdict(list)
    for name in names:
        by_function[name.partition("[")[0]].append(name)
        by_file[name.partition("::")[0]].append(name)

    def cost(name: str) -> float:
        return costs.get(name, 0.0)

    found = set()
    for cases in by_function.values():
        first = min(cases, key=cost)
        found |= {name for name in cases if cost(name) >= (ONCE if name == first else AGAIN)}
    return found - {min(tests, key=cost) for tests in by_file.values() if found.issuperset(tests)}


def merged(
    known: Mapping[str, float], measured: Mapping[str, float], failed: Collection[str], *, whole_files: bool
) -> dict[str, float]:
    """What is known with what was measured in its place, largest first; of tests in files that were run whole no other is known."""
    files = {name.partition("::")[0] for name in measured} if whole_files else set()
    kept = {name: seconds for name, seconds in known.items() if name.partition("::")[0] not in files}
    now = {name: round(seconds, 2) for name, seconds in {**kept, **measured}.items()}
    named = sorted(now, key=lambda name: (-now[name], name))
    return {name: now[name] for name in named if now[name] >= AGAIN and name not in failed and "\n" not in name}


def write(costs: Mapping[str, float]) -> None:
    LIST.write_text("".join(f"{seconds:.2f}\t{name}\n" for name, seconds in costs.items()))


def untold(measured: Mapping[str, float], costs: Mapping[str, float]) -> dict[str, float]:
    """Tests that took `TOLD` seconds or more and are not listed, largest first."""
    new = {name: seconds for name, seconds in measured.items() if seconds >= TOLD and name not in costs}
    return dict(sorted(new.items(), key=lambda each: -each[1]))


def import_what_is_imported_by_need() -> None:
    for name in IMPORTED_BY_NEED:
        with suppress(ImportError):
            importlib.import_module(name)
