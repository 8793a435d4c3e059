"""Names of the version before, which still work for one version, each with a DeprecationWarning.

A module that has lost names ends with `__getattr__ = old_names(__name__)`. A module that is gone needs no file: its rows are enough.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ALIASES: dict[str, str] = {}
"""Old dotted path of a name to the new one, such as "solvers.NORMS": "solvers.ERROR_NORMS"."""


def old_names(module: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a module some of whose names have moved: gives what stands at the new place, with a warning.

    `otherwise` is asked for all other names. Raises AttributeError for a name that neither knows.
    """

    def look_up(name: str) -> Any:
        old = f"{module}.{name}"
        if old not in ALIASES:
            if otherwise is not None:
                return otherwise(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = ALIASES[old].rpartition(".")
        warnings.warn(f"{old} is now {ALIASES[old]}; the old name works until the next version", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new)

    return look_up


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for modules that are gone: empty ones, whose names are looked up at their new place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        gone = any(old.startswith(f"{name}.") for old in ALIASES)
        return importlib.util.spec_from_loader(name, self, is_package=True) if gone else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = old_names(module.__name__)


# last in the list: it is asked only where no file has the module
sys.meta_path.append(_OldModules())
