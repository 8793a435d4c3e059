"""Shapes and types of public functions are checked at run time, in tests only: the hook precedes the packages' first import."""

import os
from importlib.util import find_spec

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

if find_spec("beartype") is not None:  # a machine borrowed for its GPU may lack it: all but annotations is tested there
    import tests.typecheck

    install_import_hook(["solvers", "ctrans"], f"{tests.typecheck.__name__}.check")

hypothesis.settings.register_profile("ctrans", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ctrans")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
