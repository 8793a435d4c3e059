"""Names of the previous version. They work for one more version, each with a DeprecationWarning.

A module that has lost names ends with `__getattr__ = old_names(__name__)`. A removed module needs
no file: its rows in ALIASES are enough.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

ALIASES: dict[str, str] = {
    "ctrans.control.FilledImage": "ctrans.control.ellipsoid.convex_hull",
    "ctrans.fields.EndsLinear": "ctrans.fields.protocols.HasOutputProjection",
    "ctrans.fields.HasPlainPath": "ctrans.fields.protocols.HasReferenceKernel",
    "ctrans.fields.SaysWhyNot": "ctrans.fields.protocols.ExplainsUnsupported",
    "ctrans.fields.ShowsHeads": "ctrans.fields.protocols.ExposesHeads",
    "ctrans.fields.ShowsMatrices": "ctrans.fields.protocols.ExposesWeights",
    "ctrans.fields.Switches": "ctrans.fields.protocols.HasDiscontinuities",
    "ctrans.fields.attention.plain_attention": "ctrans.fields.attention.reference_kernels",
    "ctrans.fields.plain_attention": "ctrans.fields.attention.reference_kernels",
    "ctrans.fields.protocols.EndsLinear": "ctrans.fields.protocols.HasOutputProjection",
    "ctrans.fields.protocols.HasPlainPath": "ctrans.fields.protocols.HasReferenceKernel",
    "ctrans.fields.protocols.SaysWhyNot": "ctrans.fields.protocols.ExplainsUnsupported",
    "ctrans.fields.protocols.ShowsHeads": "ctrans.fields.protocols.ExposesHeads",
    "ctrans.fields.protocols.ShowsMatrices": "ctrans.fields.protocols.ExposesWeights",
    "ctrans.fields.protocols.Switches": "ctrans.fields.protocols.HasDiscontinuities",
    "ctrans.monitor.Alarm": "ctrans.findings.Finding",
    "ctrans.monitor.Rule": "ctrans.monitor.alarms.old_rule",
    "ctrans.monitor.alarms.Alarm": "ctrans.findings.Finding",
    "ctrans.monitor.alarms.Rule": "ctrans.monitor.alarms.old_rule",
    "ctrans.report.page.CONTENTS": "ctrans.report.contents.SECTIONS",
    "ctrans.report.page.contents.CONTENTS": "ctrans.report.contents.SECTIONS",
    "ctrans.report.page.contents.page_of": "ctrans.report.contents.page_of",
    "ctrans.report.page.html.render": "ctrans.report.html.render",
    "ctrans.report.page.page_of": "ctrans.report.contents.page_of",
    "ctrans.report.page.parts.Cell": "ctrans.report.sections.Cell",
    "ctrans.report.page.parts.Chapter": "ctrans.report.sections.Chapter",
    "ctrans.report.page.parts.ColouredText": "ctrans.report.sections.ColouredText",
    "ctrans.report.page.parts.Column": "ctrans.report.sections.Column",
    "ctrans.report.page.parts.Diagram": "ctrans.report.sections.Plot",
    "ctrans.report.page.parts.Line": "ctrans.report.sections.Line",
    "ctrans.report.page.parts.Page": "ctrans.report.sections.Page",
    "ctrans.report.page.parts.Sheet": "ctrans.report.sections.Table",
    "ctrans.report.page.parts.Token": "ctrans.report.sections.Token",
    "ctrans.report.page.parts.Words": "ctrans.report.sections.Words",
    "ctrans.report.page.parts.cell": "ctrans.report.sections.cell",
    "ctrans.report.page.parts.digits": "ctrans.report.sections.digits",
    "ctrans.report.page.render": "ctrans.report.html.render",
    "ctrans.interop.any_model.diagnose": "ctrans.analysis.diagnose",
    "ctrans.interop.any_model.screen": "ctrans.analysis.screen",
    "ctrans.interop.any_model.simulate": "ctrans.analysis.simulate",
    "ctrans.stability.diagnosis.ailments.AILMENTS": "ctrans.stability.diagnosis.diagnostic_checks.CHECKS",
    "ctrans.stability.diagnosis.ailments.Ailment": "ctrans.findings.Check",
    "ctrans.stability.diagnosis.ailments.SEVERITIES": "ctrans.findings.SEVERITIES",
    "ctrans.stability.diagnosis.ailments.Severity": "ctrans.findings.Severity",
    "ctrans.stability.diagnosis.diagnose.Symptom": "ctrans.findings.Finding",
    "ctrans.stability.screening.case.Finding": "ctrans.stability.screening.case.StepVerdict",
    "ctrans.walk.Passage": "ctrans.walk.instrument.StepContext",
    "ctrans.walk.PassageBack": "ctrans.walk.instrument.StepContextBack",
    "ctrans.walk.instrument.Passage": "ctrans.walk.instrument.StepContext",
    "ctrans.walk.instrument.PassageBack": "ctrans.walk.instrument.StepContextBack",
    "solvers.NORMS": "solvers.error_norm.ERROR_NORMS",
    "ctrans.verify.convergence.Convergence": "ctrans.model.orders.Convergence",
    "ctrans.verify.convergence.depth_convergence": "ctrans.model.orders.depth_convergence",
    "ctrans.verify.convergence.own_methods": "ctrans.model.orders.own_methods",
    "ctrans.verify.convergence.substep_convergence": "ctrans.model.orders.substep_convergence",
}
"""Old dotted path of a name to the new one, such as "solvers.NORMS": "solvers.ERROR_NORMS"."""


def old_names(module: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a module some of whose names have moved: returns the object at the new
    place, with a warning.

    `otherwise` looks up all other names. Raises AttributeError for an unknown name.
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


def _set_member(name: str, self: Any, value: Any) -> None:
    setattr(self, name, value)


def old_member(old: str, new: str) -> Any:
    """A property for the old name of the member `new`; reading and setting it gives a warning."""

    def get(self: Any) -> Any:
        _warn_of_member(type(self), old, new)
        return getattr(self, new)

    def put(self: Any, value: Any) -> None:
        _warn_of_member(type(self), old, new)
        setattr(self, new, value)

    return property(get, put)


def adopt_old_members(kind: type, renamed: Mapping[str, str]) -> None:
    """Gives a class that was written for the previous version its members by their new names.
    `renamed` maps old names to new ones.
    """
    for old, new in renamed.items():
        _warn_of_member(kind, old, new)
        setattr(kind, new, property(operator.attrgetter(old), functools.partial(_set_member, old)))


def call_old_hook(owner: object, old: str, new: str) -> None:
    """Calls the method `old` that a user's class still has, with the attribute `new` in its place."""
    if (hook := getattr(owner, old, None)) is not None:
        _warn_of_member(type(owner), old, new)
        hook(getattr(owner, new))


def _warn_of_member(kind: type, old: str, new: str) -> None:
    warnings.warn(
        f"{kind.__name__}.{old} is now {new}; the old name works until the next version", DeprecationWarning, stacklevel=3
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_keyword(old: str, new: str) -> Callable[[Function], Function]:
    """A decorator: the function takes its argument `new` by the keyword `old` too, with a warning.

    Raises TypeError for a call that gives both.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                if new in options:
                    raise TypeError(f"{name}() got {new} twice: {old} is its old name")
                warnings.warn(
                    f"{name}({old}=...) is now {name}({new}=...); the old keyword works until the next version",
                    DeprecationWarning,
                    stacklevel=2,
                )
                options[new] = options.pop(old)
            return function(*args, **options)

        return cast(Function, call)

    return decorate


Options = TypeVar("Options")
OLD_KEYWORDS = ("norm", "first_step", "min_step", "max_step", "max_steps")
"""Former keywords of `solve` and `solve_each`, which are now fields of `StepControl`."""


def with_old_keywords(function: str, control: Options, old: Mapping[str, Any]) -> Options:
    """The step control with the values of the old keywords, with a warning. Raises TypeError for an
    unknown keyword.
    """
    if not old:
        return control
    if unknown := sorted(set(old) - set(OLD_KEYWORDS)):
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")
    now = ", ".join(f"{name}=..." for name in old)
    warnings.warn(
        f"{function}({now}) is now {function}(step_control=StepControl({now})); the old keywords work until the next version",
        DeprecationWarning,
        stacklevel=4,
    )
    given = {name: value for name, value in old.items() if value is not None}
    return dataclasses.replace(control, **given)  # type: ignore[type-var]  # a StepControl


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces removed modules by empty ones, which look up their names at the new place."""

    def find_spec(self, name: str, path: Iterable[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        gone = any(old.startswith(f"{name}.") for old in ALIASES)
        return importlib.util.spec_from_loader(name, self, is_package=True) if gone else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = old_names(module.__name__)


# last in the list: it is asked only where no file has the module
sys.meta_path.append(_OldModules())
