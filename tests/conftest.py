"""Shapes and types of public functions are checked at run time, in tests only: the hook precedes the packages' first import."""

import collections
import os
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

from tests.cases import covering

if find_spec("beartype") is not None:  # a machine borrowed for its GPU may lack it: all but annotations is tested there
    import tests.typecheck

    install_import_hook(["solvers", "ctrans"], f"{tests.typecheck.__name__}.check")

hypothesis.settings.register_profile("ctrans", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ctrans")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

TYPES_CHECKED = pytest.StashKey[bool]()
COSTS = Path(__file__).parent / "costs.txt"
"""Processor seconds of the dear tests, as `make costs` measures them."""
DEAR = 0.45
"""Seconds from which a test is one for `make test-all`."""


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help=f"measure each test's processor seconds, and write {COSTS.name} anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without slow tests, a test with several tables of cases meets every case of each table, not all their combinations; and shapes
    and types, which double a test's time, are checked in its first case, and not where whole commands are run. Tests that are dear
    are slow ones, but for those marked as core.
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
        for case in cases:
            first = case is cases[0] and "cli" not in case.path.parts
            case.stash[TYPES_CHECKED] = first or "not slow" not in config.option.markexpr
    dear = set() if config.option.costs else {line.split("\t")[1] for line in COSTS.read_text().splitlines()}
    for item in items:
        if item.nodeid in dear and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.slow)


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
    if not config.option.costs:
        return
    ends = [each for each in terminalreporter.stats.get("", []) if each.when == "teardown"]
    costs = {end.nodeid: seconds for end in ends for name, seconds in end.user_properties if name == "seconds"}
    dear = sorted((name for name, seconds in costs.items() if seconds >= DEAR), key=lambda name: (-costs[name], name))
    COSTS.write_text("".join(f"{costs[name]:.2f}\t{name}\n" for name in dear))
    terminalreporter.write_line(
        f"{sum(costs.values()):.0f} processor seconds, of which {len(dear)} dear tests take {sum(costs[name] for name in dear):.0f}"
    )


@pytest.fixture(autouse=True)
def _types(request):
    jaxtyping.config.update("jaxtyping_disable", not request.node.stash[TYPES_CHECKED])
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
