"""Shapes and types of public functions are checked at run time, in tests only: the hook precedes
the packages' first import.
"""

import collections
import math
import os

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from tests import typecheck
from tests.cases import covering, evenly_spread

if typecheck.beartype is not None:
    install_import_hook(["solvers", "ctrans"], f"{typecheck.__name__}.check")

from ctrans.base import as_found
from tests.guests import checking_as_found

as_found.leaving_as_found = checking_as_found(as_found.leaving_as_found, as_found._HELD)

hypothesis.settings.register_profile("ctrans", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ctrans")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

CHECKS = pytest.StashKey[float]()
LONG = 2.0
"""Processor seconds from which `make test` names a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses what `make test` leaves to `make test-all`, besides tests marked `slow`.

    Of a test with several tables of cases it keeps each row of each table, not all their
    combinations. Of a test marked `cases(n)` it keeps n cases. Shapes and types are only checked in
    the first calls of a test's first case, and not in whole commands, because the checks double a
    test's time.
    """
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
    for cases in of_a_test.values():
        first = next((case for case in cases if case.get_closest_marker("slow") is None), cases[0])
        for case in cases:
            few = typecheck.FEW if case is first and "cli" not in case.path.parts else 0
            case.stash[CHECKS] = few if "not slow" in config.option.markexpr else math.inf


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
    """Names quick tests that took long, with the mark that helps, and the sum over all tests."""
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
    if "not slow" in config.option.markexpr:
        for name in sorted(
            (name for name in seconds if seconds[name] >= LONG), key=seconds.get, reverse=True
        ):
            terminalreporter.write_line(
                f"{seconds[name]:.1f} processor seconds: mark it slow or cases(n): {name}"
            )
    terminalreporter.write_line(f"{sum(seconds.values()):.0f} processor seconds in tests")


@pytest.fixture(autouse=True)
def _types(request):
    if request.node.get_closest_marker("untyped"):
        typecheck.allow(0)
    else:
        typecheck.allow(request.node.stash[CHECKS])
    yield
    typecheck.allow(math.inf)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collectstart(collector):
    """Modules that a test file builds at its import have the same weights whatever was imported
    before it.
    """
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)
