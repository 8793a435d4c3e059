"""What the options of `Monitor` may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctrans.base.json_values import is_step
from ctrans.dynamics.depth import check_count
from ctrans.training.monitor.alarms import check_limits
from ctrans.training.monitor.reactions import check_reactions
from solvers import ConfigError, shown, unknown


def _is_norm(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _are_functions(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, Path))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "start": (is_step, "the number of steps done, 0 or more"),
    "total": (is_step, "the training's number of steps, or None"),
    "clip": (_is_norm, "a norm above 0, or None"),
    "scale": (callable, "a function, such as scaler.get_scale"),
    "save": (callable, "a function of the alarm"),
    "told": (_are_functions, "a list of functions of step and figures"),
    "held": (_is_pair, "a pair (tokens, targets)"),
    "out": (_is_path, "a directory"),
    "memory": (_is_mapping, "the result of Monitor.memory()"),
}
"""What an option of `Monitor` may be, besides its default: a test of it, and that in words."""


def check_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that `Monitor` does not have (it has those of `defaults`), or
    that are invalid or contradict each other.
    """
    for name in options:
        if name not in defaults:
            raise unknown("option of a monitor", name, defaults)
    options = {**defaults, **options}
    check_count("every", options["every"])
    for name, (fits, allowed) in ALLOWED.items():
        if options[name] != defaults[name] and not fits(options[name]):
            raise ConfigError(f"{name} = {shown(options[name])}: give {allowed}")
    if options["probe_every"] is not None:
        check_count("probe_every", options["probe_every"])
        if options["held"] is None:
            raise ConfigError("probe_every needs a batch: give held=(tokens, targets)")
    check_limits(options["limits"] or {})
    react = check_reactions(options["react"])
    if "save" in react and options["save"] is None and options["out"] is None:
        raise ConfigError(
            "react = 'save' needs a place: give out=DIR, or save=FUNCTION of the alarm"
        )
    if "skip" in react and options["scale"] is not None and not options["unscaled"]:
        raise ConfigError(
            "react = 'skip' cannot remove gradients that a GradScaler still has to unscale: call"
            " scaler.unscale_(optimizer) before monitor.step, and give unscaled=True"
        )
