"""The sources of the user's modules: those that importing one of them loads from its own folder or
package. Python compiles them from the bytes that are there now.

A file in __pycache__ counts as current if its source has the size and the time that it names. So an
edited source could run as it was before, while its digest is that of the new text.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Directories of installed modules, which are none of a plugin's own."""
LIBRARY = Path(os.path.realpath(os.__file__)).parent
"""Python's standard library."""
OURS = frozenset({"ctrans", "solvers"})
"""Packages of ctrans, whose version results have anyway."""
LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
"""Python's own loaders of files: sources, and compiled modules."""


class SourceLoader(SourceFileLoader):
    """Compiles a module's bytes as they are now, and adds their SHA-256 to the `sources`."""

    def __init__(self, name: str, path: str, sources: OwnSources):
        super().__init__(name, path)
        self.sources = sources

    def get_code(self, fullname: str) -> CodeType:
        content = self.get_data(self.path)
        self.sources.digests[self.path] = hashlib.sha256(content).digest()
        before, null, _ = content.partition(b"\0")
        if null:  # Python's own error has no place
            place = (self.path, before.count(b"\n") + 1, None, None)
            raise SyntaxError("source code cannot contain null bytes", place)
        code: CodeType = self.source_to_code(content, self.path)
        self.sources.check_imports(ast.parse(content, self.path))
        return code


class OwnSources:
    """A finder of modules that loads those in the `folders` by `SourceLoader`, and leaves all other
    ones to the other finders. `digests` has the SHA-256 of each file that it loaded, by path; also
    of compiled ones, which other loaders read.
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
        loader = spec.loader
        if not isinstance(loader, LOADERS) or self.relative(loader.path) is None:
            return spec
        if type(loader) is SourceFileLoader:
            spec.loader = SourceLoader(name, loader.path, self)
        else:  # compiled, or read by a loader of the user's
            self.digests[loader.path] = hashlib.sha256(Path(loader.path).read_bytes()).digest()
        return spec

    def relative(self, path: str) -> str | None:
        """The path below its folder; None for a file elsewhere, or of an installed module. A link
        in the folder is a file of the folder.
        """
        if Path(os.path.realpath(path)).is_relative_to(LIBRARY):
            return None
        for place in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
            for folder in self.folders:
                if place.is_relative_to(folder):
                    below = place.relative_to(folder)
                    if INSTALLED.isdisjoint(below.parts):
                        return str(below)
        return None

    def check_imports(self, tree: ast.Module) -> None:
        """Raises ImportError if the source imports a module of these folders whose name a plugin in
        another folder has taken: Python would give it that one.
        """
        for name in _imported_names(tree):
            loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
            if not isinstance(loader, SourceLoader):
                continue
            own = PathFinder.find_spec(name, list(map(str, self.folders)))
            if own is not None and own.has_location and own.origin is not None:
                _check_same(name, loader.path, own.origin)


def _imported_names(tree: ast.Module) -> set[str]:
    """The packages and modules that the source imports, other than relative ones."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def _check_same(name: str, taken: str, own: str) -> None:
    if os.path.realpath(taken) != os.path.realpath(own):
        raise ImportError(
            f"module {name!r} is {taken!r} already, and here it would be {own!r}: rename one"
        )


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
        return _with_real(map(Path, spec.submodule_search_locations))
    if not spec.has_location or spec.origin is None:  # a built-in module
        return []
    folders = _with_real([Path(spec.origin).parent])
    if any(INSTALLED & set(folder.parts) for folder in folders):
        return []
    return folders


def _with_real(folders: Iterable[Path]) -> list[Path]:
    """The folders as they are named, and with links followed."""
    both = [(Path(os.path.abspath(path)), Path(os.path.realpath(path))) for path in folders]
    return list(dict.fromkeys(itertools.chain.from_iterable(both)))


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
