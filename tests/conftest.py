"""Chooses what `make test` runs, and names what took it long. In all other runs, shapes and types of
public functions are checked at run time: the hook precedes the packages' first import.
"""

import collections
import os
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from tests import typecheck
from tests.cases import covering, evenly_spread, is_in_slow_place
from tests.end_to_end import END_TO_END

hypothesis.settings.register_profile("ctrans", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ctrans")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

TESTS = Path(__file__).parent
LONG = 0.3
"""Processor seconds from which a test is slow, unless it stands in `END_TO_END`."""


def is_quick_run(config):
    return "not slow" in config.option.markexpr


def pytest_configure(config):
    if not is_quick_run(config) and typecheck.beartype is not None:
        install_import_hook(["solvers", "ctrans"], f"{typecheck.__name__}.check")
    from ctrans.base import as_found
    from tests.guests import checking_as_found

    as_found.leaving_as_found = checking_as_found(as_found.leaving_as_found, as_found._HELD)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses what `make test` leaves to `make test-all`, besides tests marked `slow`.

    These are the tests in `SLOW_PLACES`. Of a test with several tables of cases it keeps each row
    of each table, not all their combinations. Of a test marked `cases(n)` it keeps n cases.
    """
    for item in items:
        if is_in_slow_place(item.path.relative_to(TESTS).as_posix()):
            item.add_marker(pytest.mark.slow)
    of_a_test = collections.defaultdict(list)
    for item in items:
        of_a_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_a_test.values():
        free = [case for case in cases if case.get_closest_marker("slow") is None]
        kept = covering([_places(case) for case in free]) if len(free) > 1 else [0]
        few = cases[0].get_closest_marker("cases")
        if few is not None:
            kept = evenly_spread(kept, *few.args)
        for place, case in enumerate(free):
            if place not in kept:
                case.add_marker(pytest.mark.slow)


def _places(case):
    """By each table of cases, its parameters' names, what identifies the row."""
    tables = [mark.args[0] for mark in case.iter_markers("parametrize")]
    tables = [
        tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        for names in tables
    ]
    fixtures = set(case.callspec.params).difference(*tables)
    return {
        names: tuple(id(case.callspec.params[name]) for name in names)
        for names in [*tables, *((name,) for name in fixtures)]
    }


@pytest.fixture(autouse=True)
def _cost(request):
    """Processor seconds, of processes that it starts too."""
    start = sum(os.times()[:4])
    yield
    request.node.user_properties.append(("seconds", sum(os.times()[:4]) - start))


def pytest_terminal_summary(terminalreporter, config):
    """Names quick tests that took long, and the sum over all tests. It fails no test: a time
    depends on what else the machine does.
    """
    reports = [
        each
        for found in terminalreporter.stats.values()
        for each in found
        if isinstance(each, pytest.TestReport)
    ]
    ends = [each for each in reports if each.when == "teardown"]
    seconds = {
        end.nodeid: cost for end in ends for name, cost in end.user_properties if name == "seconds"
    }
    if is_quick_run(config):
        long = [
            name
            for name in seconds
            if seconds[name] >= LONG
            and name not in END_TO_END
            and not name.startswith("tests/lint/")
        ]
        for name in sorted(long, key=seconds.get, reverse=True):
            terminalreporter.write_line(
                f"{seconds[name]:.1f} processor seconds: mark it slow or cases(n): {name}"
            )
    terminalreporter.write_line(f"{sum(seconds.values()):.0f} processor seconds in tests")


@pytest.fixture(autouse=True)
def _types(request):
    typecheck.allow(request.node.get_closest_marker("untyped") is None)
    yield
    typecheck.allow(True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collectstart(collector):
    """Modules that a test file builds at its import have the same weights whatever was imported
    before it.
    """
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)
