"""Shapes and types of public functions are checked at run time, in tests only: the hook precedes the packages' first import."""

import collections
import math
import os

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

from tests import costs
from tests.cases import covering

try:
    from tests import typecheck
except ImportError:  # beartype: a machine borrowed for its GPU may lack it, and all but annotations is tested there
    typecheck = None
else:
    install_import_hook(["solvers", "ctrans"], f"{typecheck.__name__}.check")

hypothesis.settings.register_profile("ctrans", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ctrans")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

CHECKS = pytest.StashKey[float]()


def pytest_addoption(parser):
    says = f"write the processor seconds of the tests that are run, kept or all but the slow ones, to {costs.LIST.name}"
    parser.addoption("--costs", choices=("kept", "all"), help=says)


def pytest_sessionstart(session):
    if session.config.option.costs:
        costs.import_what_is_imported_by_need()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without slow tests, a test with several tables of cases meets every case of each table, not all their combinations; and shapes
    and types, which double a test's time, are checked in the first calls of its first case, and not where whole commands are run. Tests
    that are dear are slow ones (`tests.costs`), but for those marked as core.
    """
    of_a_test = collections.defaultdict(list)
    for item in items:
        of_a_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_a_test.values():
        free = [case for case in cases if case.get_closest_marker("slow") is None]
        chosen = set(covering([_places(case) for case in free])) if len(free) > 1 else {0}
        for place, case in enumerate(free):
            if place not in chosen:
                case.add_marker(pytest.mark.slow)
    if config.option.costs != "all":
        free = [item for item in items if not {"slow", "core"} & {mark.name for mark in item.iter_markers()}]
        dear = costs.left_out([item.nodeid for item in free], costs.listed())
        for item in free:
            if item.nodeid in dear:
                item.add_marker(pytest.mark.slow)
    for cases in of_a_test.values():
        first = next((case for case in cases if case.get_closest_marker("slow") is None), cases[0])
        for case in cases:
            few = typecheck.FEW if typecheck and case is first and "cli" not in case.path.parts else 0
            case.stash[CHECKS] = few if "not slow" in config.option.markexpr else math.inf


def _places(case):
    """By each table of cases, its parameters' names, what identifies the row."""
    tables = [mark.args[0] for mark in case.iter_markers("parametrize")]
    tables = [tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names) for names in tables]
    fixtures = set(case.callspec.params).difference(*tables)
    return {
        names: tuple(id(case.callspec.params[name]) for name in names) for names in [*tables, *((name,) for name in fixtures)]
    }


@pytest.fixture(autouse=True)
def _cost(request):
    """Processor seconds, of processes that it starts too."""
    start = sum(os.times()[:4])
    yield
    request.node.user_properties.append(("seconds", sum(os.times()[:4]) - start))


def pytest_terminal_summary(terminalreporter, config):
    """Writes the costs where that is asked; else tells about dear tests that are not listed."""
    reports = [each for found in terminalreporter.stats.values() for each in found if isinstance(each, pytest.TestReport)]
    ends = [each for each in reports if each.when == "teardown"]
    measured = {end.nodeid: seconds for end in ends for name, seconds in end.user_properties if name == "seconds"}
    if config.option.costs:
        failed = {each.nodeid for each in reports if each.failed}
        whole = config.option.costs == "all" and not config.option.keyword and not any("::" in each for each in config.args)
        costs.write(costs.merged(costs.listed(), measured, failed, whole_files=whole))
    for name, seconds in costs.untold(measured, costs.listed()).items():
        terminalreporter.write_line(f"{seconds:.1f} processor seconds, and not in {costs.LIST.name} (make costs): {name}")
    more = sum(measured.values()) > costs.BUDGET and "not slow" in config.option.markexpr
    said = f", more than {costs.BUDGET} (tests/costs.py)" if more else ""
    terminalreporter.write_line(f"{sum(measured.values()):.0f} processor seconds in tests{said}")


@pytest.fixture(autouse=True)
def _types(request):
    if typecheck:
        typecheck.allow(request.node.stash[CHECKS])
    yield
    if typecheck:
        typecheck.allow(math.inf)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
