"""Modules and attributes under the names that they had in version 0.3, and commands that are gone.

Each old name gives what has another name today, with a DeprecationWarning. Version 0.5 removes this
file.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BASE = (
    "as_found",
    "given_files",
    "json_values",
    "memory",
    "option",
    "pages",
    "printable",
    "protocol",
    "shapes",
    "threads",
)
_DYNAMICS = (
    "depth",
    "fields",
    "norm",
    "ode_block",
    "placement",
    "residual",
    "scheme",
    "sublayer",
    "weights",
)
REMOVED_COMMANDS = {
    "families": "the table in docs/howto/model-families.md",
    "rate": "ctrans study FILE.toml with several learning_rates (docs/commands/study.md)",
}
"""What to use in place of a command of version 0.3 that is gone."""
MOVED = {
    **{f"ctrans.{name}": f"ctrans.base.{name}" for name in _BASE},
    **{f"ctrans.{name}": f"ctrans.dynamics.{name}" for name in _DYNAMICS},
    "ctrans.analysis": "ctrans.examine.analysis",
    "ctrans.control.ball": "ctrans.control.norm_image",
    "ctrans.control.box": "ctrans.control.norm_image",
    "ctrans.control.certificate_ascents": "ctrans.control.evidence",
    "ctrans.control.ellipsoid": "ctrans.control.ellipsoids",
    "ctrans.control.growth": "ctrans.control.evidence",
    "ctrans.control.hjb_study": "ctrans.control.hjb.study",
    "ctrans.control.hopf_lax": "ctrans.control.hjb.hopf_lax",
    "ctrans.control.rank_gap": "ctrans.control.last_map",
    "ctrans.control.section": "ctrans.control.step_image",
    "ctrans.control.statements": "ctrans.theory",
    "ctrans.control.statements.architectures": "ctrans.theory.section_04_architectures",
    "ctrans.control.statements.norm_images": "ctrans.theory.section_04_norm_images",
    "ctrans.control.statements.values": "ctrans.theory.section_04_values",
    "ctrans.control.statements.weight_decay": "ctrans.theory.section_04_weight_decay",
    "ctrans.findings": "ctrans.measure.findings",
    "ctrans.interop.to_transformers": "ctrans.interop.transformers_export",
    "ctrans.model.random_models": "ctrans.theory.random_models",
    "ctrans.monitor": "ctrans.training.monitor",
    "ctrans.monitor.reductions": "ctrans.measure.reductions",
    "ctrans.norm.geometry_statements": "ctrans.theory.section_03_norm_geometry",
    "ctrans.norm.random_norms": "ctrans.theory.random_norms",
    "ctrans.norm.table_statements": "ctrans.theory.section_03_norm_table",
    "ctrans.stability": "ctrans.measure",
    "ctrans.stability.attention.lipschitz_statements": "ctrans.theory.section_09_lipschitz",
    "ctrans.stability.attention.theta_statements": "ctrans.theory.section_09_softmax",
    "ctrans.stability.backward.adjoint_statements": "ctrans.theory.section_07_adjoint",
    "ctrans.stability.backward.path_statements": "ctrans.theory.section_09_gradient_paths",
    "ctrans.stability.backward.sensitivity_statements": "ctrans.theory.section_07_sensitivity",
    "ctrans.stability.diagnosis": "ctrans.examine.diagnosis",
    "ctrans.stability.diagnosis.shared_limits": "ctrans.examine.diagnosis.diagnostic_checks",
    "ctrans.stability.forward.conservation_statements": "ctrans.theory.section_03_conservation",
    "ctrans.stability.screening": "ctrans.examine.screening",
    "ctrans.stability.transport.transport_statements": "ctrans.theory.section_08_transport",
    "ctrans.statement": "ctrans.theory.statement",
    "ctrans.training.reach_statements": "ctrans.theory.section_11_reach",
    "ctrans.verify": "ctrans.theory",
    "ctrans.verify.run": "ctrans.theory.verify",
    "ctrans.verify.table": "ctrans.theory.all_statements",
    "ctrans.walk": "ctrans.measure.walk",
}
"""Old names of modules and packages, with those of today. The rest of a longer name stays."""


def name_of_today(name: str) -> str | None:
    """The module's name of today; None for a name that did not move."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        moved = MOVED.get(".".join(parts[:length]))
        if moved is not None:
            return ".".join([moved, *parts[length:]])
    return None


class OldNames(MetaPathFinder, Loader):
    """Finds the module of today for an old name."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name_of_today(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new_name = name_of_today(spec.name)
        assert new_name is not None, "find_spec gives no other names"
        warnings.warn(
            f"{spec.name} is now {new_name}: change the import", DeprecationWarning, stacklevel=2
        )
        module = importlib.import_module(new_name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module back its own spec, which the import of the old name replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


class OldReasons:
    """An attribute of a result that said why something was not measured. `missing` has it now.

    With `part` it is the reason of that part alone, or `nothing` if the part was measured.
    """

    def __init__(self, part: str | None = None, nothing: str | None = None):
        self.part = part
        self.nothing = nothing

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: Any, owner: type) -> Any:
        if result is None:
            return self
        new_name = "missing"
        if self.part is not None:
            new_name += f".get({self.part!r})"
        warnings.warn(
            f"{owner.__name__}.{self.name} is now {owner.__name__}.{new_name}",
            DeprecationWarning,
            stacklevel=2,
        )
        if self.part is None:
            return result.missing
        return result.missing.get(self.part, self.nothing)

    def __set__(self, result: Any, value: Any) -> None:
        raise AttributeError(f"{type(result).__name__}.{self.name} is now `missing`: change that")

    def reasons(self, value: Any) -> Any:
        """`missing` for the value of the old key in a JSON object."""
        if self.part is None:
            return value
        if value:
            return {self.part: value}
        return {}


def with_missing(kind: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result's JSON object with `missing` in place of the keys that version 0.3 had."""
    if "missing" in values:
        return values
    old_keys = {
        name: attribute
        for owner in kind.__mro__
        for name, attribute in vars(owner).items()
        if isinstance(attribute, OldReasons) and name in values
    }
    if not old_keys:
        return values
    missing: Any = {}
    for name, attribute in old_keys.items():
        reasons = attribute.reasons(values[name])
        if not isinstance(reasons, Mapping):
            return {**values, "missing": reasons}  # whoever reads it raises an error that names it
        missing.update(reasons)
    return {**values, "missing": missing}


def install() -> None:
    """Makes the old names importable. They come first: an old package has the files of the new one
    on its path.
    """
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
