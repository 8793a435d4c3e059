"""Shapes and types of public functions are checked at run time, in tests only: the hook precedes the packages' first import."""

import collections
import os
from importlib.util import find_spec

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without slow tests, a test with several tables of cases meets every case of each table, not all their combinations; and shapes
    and types, which double a test's time, are checked in its first case, and not where whole commands are run.
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


def _places(case):
    """By each table of cases, its parameters' names, what identifies the row."""
    tables = [mark.args[0] for mark in case.iter_markers("parametrize")]
    tables = [tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names) for names in tables]
    fixtures = set(case.callspec.params).difference(*tables)
    return {
        names: tuple(id(case.callspec.params[name]) for name in names) for names in [*tables, *((name,) for name in fixtures)]
    }


@pytest.fixture(autouse=True)
def _types(request):
    jaxtyping.config.update("jaxtyping_disable", not request.node.stash[TYPES_CHECKED])
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
