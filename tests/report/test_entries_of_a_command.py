"""The modules that a command's result is shown with have the entries of all of its measures."""

import ast
import importlib
import inspect
import json
import subprocess
import sys

import pytest

from ctrans.report.contents import ENTRIES

NAMERS = {"Value", "along_depth"}
SHOWN = """
import importlib, json, sys
modules, names = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
from ctrans.measure.measures import MEASURES
print(json.dumps([name for name in names if name not in MEASURES]))
"""


def measures_named_in(module):
    """The measures that a module's source names in its values."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in NAMERS and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


@pytest.mark.slow
@pytest.mark.parametrize("command", ENTRIES)
def test_every_measure_of_a_command_is_known_to_its_page(command):
    """In a process of its own, where no other command has loaded further entries."""
    modules = ENTRIES[command]
    names = [name for module in modules for name in measures_named_in(module)]
    asked = json.dumps([modules, names])
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, asked], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
