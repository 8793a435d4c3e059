"""The sources of the user's modules: those that importing one of them loads from its own folder or
package. Python compiles them from the bytes that are there now.

A file in __pycache__ counts as current if its source has the size and the time that it names. So an
edited source could run as it was before, while its digest is that of the new text.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Directories of installed modules, which are none of a plugin's own."""
LIBRARY = Path(os.path.realpath(os.__file__)).parent
"""Python's standard library."""
OURS = frozenset({"ctrans", "solvers"})
"""Packages of ctrans, whose version results have anyway."""


class SourceLoader(SourceFileLoader):
    """Compiles a module's bytes as they are now, and adds their SHA-256 to `digests`, by path."""

    def __init__(self, name: str, path: str, digests: dict[str, bytes]):
        super().__init__(name, path)
        self.digests = digests

    def get_code(self, fullname: str) -> CodeType:
        content = self.get_data(self.path)
        self.digests[self.path] = hashlib.sha256(content).digest()
        code: CodeType = self.source_to_code(content, self.path)
        return code


class OwnSources:
    """A finder of modules that loads those in the `folders` by `SourceLoader`, and leaves all other
    ones to the other finders. `digests` has the SHA-256 of each source that it loaded, by path.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.digests: dict[str, bytes] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in OURS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return self._from_source(name, spec)
        return None

    def _from_source(self, name: str, spec: ModuleSpec) -> ModuleSpec:
        if type(spec.loader) is SourceFileLoader and self._is_own(spec.loader.path):
            spec.loader = SourceLoader(name, spec.loader.path, self.digests)
        return spec

    def _is_own(self, path: str) -> bool:
        return self.relative(path) is not None

    def relative(self, path: str) -> str | None:
        """The path below its folder; None for a file elsewhere, or of an installed module."""
        place = Path(os.path.realpath(path))
        if place.is_relative_to(LIBRARY):
            return None
        for folder in self.folders:
            if place.is_relative_to(folder):
                below = place.relative_to(folder)
                if INSTALLED.isdisjoint(below.parts):
                    return str(below)
        return None


@contextmanager
def own_sources(where: str) -> Iterator[OwnSources]:
    """Inside, Python loads the own modules of a .py file, or of a module by its name, from their
    sources.
    """
    finder = OwnSources(folders_of(where))
    sys.meta_path.insert(0, finder)
    try:
        yield finder
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def folders_of(where: str) -> list[Path]:
    """The folders whose modules are a plugin's own: that of a .py file, that of a package, or that
    of a module which is not installed.
    """
    if where.endswith(".py"):
        return [Path(where).resolve().parent]
    spec = _found(where.partition(".")[0])
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(os.path.realpath(place)) for place in spec.submodule_search_locations]
    if not spec.has_location or spec.origin is None:  # a built-in module
        return []
    folder = Path(os.path.realpath(spec.origin)).parent
    if INSTALLED & set(folder.parts):
        return []
    return [folder]


def file_of_module(name: str) -> Path | None:
    """The file of a module by its name, without running any code; None if it is not found."""
    places: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    beginning = ""
    for part in name.split("."):
        beginning = f"{beginning}.{part}".removeprefix(".")
        spec = _found(beginning, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return Path(spec.origin)


def _found(name: str, places: Sequence[str] | None = None) -> ModuleSpec | None:
    """Where Python finds a module: in these places, or where it finds a module of the command."""
    if places is None and os.getcwd() not in sys.path:
        spec = PathFinder.find_spec(name, [*sys.path, os.getcwd()])
        if spec is not None:
            return spec
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return None
