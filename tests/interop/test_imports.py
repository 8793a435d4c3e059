"""What is imported of the readers of other libraries' models, and when."""

import pkgutil
import subprocess
import sys

import pytest

from ctrans import interop

FEW = 8


def test_a_name_that_is_imported_later_is_no_modules_name():
    """The import of a module of that name would replace it."""
    modules = {module.name for module in pkgutil.iter_modules(interop.__path__)}
    assert not modules & interop._HOMES.keys()


def test_every_name_of_the_package_is_there():
    assert set(interop.__all__) == {*interop._HOMES, "open_model"}
    for name in interop.__all__:
        assert getattr(interop, name) is not None


@pytest.mark.slow
def test_the_command_simulate_imports_few_readers():
    code = (
        "import sys, ctrans.cli.simulate;"
        " print(*(name for name in sys.modules if name.startswith('ctrans.interop')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(run.stdout.split()) <= FEW, run.stdout
