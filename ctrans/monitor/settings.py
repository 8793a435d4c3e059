"""What a monitor is asked for, each setting checked when it is made."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ctrans.depth import check_count
from ctrans.findings import Finding
from ctrans.interop import open_model
from ctrans.monitor.alarms import check_limits
from ctrans.monitor.reactions import check_reactions
from solvers import ConfigError
from solvers.errors import unknown

ToldFigures = Callable[[int, Mapping[str, float]], object]
"""Told of a report: its step, and figures by name, those by depth as their least, median and
largest.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Everything that `Monitor(model, ...)` takes by name, beside the options of `open_model`.

    - `every`: steps between reports, of which the first step has one. Between them nothing is
      hooked
    - `out`: the directory of its log, which `ctrans watch` shows; nothing is written without
    - `probe_every`: steps between probes, each a walk on the `held` batch of (tokens, targets);
      never by default
    - `limits`: of alarms, as {"attention logits grow": {"limit": 100}} (see `ALARMS`)
    - `react`: names of `REACTIONS`; none by default. `save` is called with the alarm in place of
      writing the weights to `out`
    - `told`: functions that get every report, for another logger; `tensorboard` writes its files to
      `out`
    - `start`, `total`: the step that the training goes on from, and how many it will have
    - `memory`: what `Monitor.memory()` gave at the step `start`: alarms and reactions go on as if
      it had not stopped
    - `clip`: the norm to which gradients are cut after `step` is told, where they are: Adam's
      second moments are of cut ones
    - `scale`: what the loss was multiplied with before `backward`, as `GradScaler.get_scale`, a
      function: gradients are told without it, and those that overflow in it not at all. `unscaled`:
      whether the weights' gradients are already without it when `step` is told, as after
      `GradScaler.unscale_`; those of states never are
    - `compiled`: whether the model's passes are compiled. A compiler's graph has no hooks: `step`
      is then to be given the `batch` that the model was called with, its arguments, and a quarter
      of its sequences is looked at once more, uncompiled, forward only. None finds out

    Raises ConfigError for what cannot be.
    """

    every: int = 50
    out: str | Path | None = None
    probe_every: int | None = None
    held: tuple[Tensor, Tensor] | None = None
    limits: Mapping[str, Mapping[str, float]] | None = None
    react: Collection[str] = ()
    save: Callable[[Finding], object] | None = None
    told: Sequence[ToldFigures] = ()
    tensorboard: bool = False
    start: int = 0
    total: int | None = None
    memory: Mapping[str, Any] | None = None
    clip: float | None = None
    scale: Callable[[], float] | None = None
    unscaled: bool = False
    compiled: bool | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.probe_every is not None:
            check_count("probe_every", self.probe_every)
            if self.held is None:
                raise ConfigError("probe_every needs a batch to walk on: give held=(tokens, targets)")
        check_limits(self.limits or {})
        if "save" in check_reactions(self.react) and self.save is None and self.out is None:
            raise ConfigError("react = 'save' needs a place: give out=DIR, or save=FUNCTION of the alarm")
        if "skip" in self.react and self.scale is not None and not self.unscaled:
            raise ConfigError(
                "react = 'skip' leaves a GradScaler without gradients to look at: call scaler.unscale_(optimizer) before step is told, and "
                "give unscaled=True"
            )

    @property
    def directory(self) -> Path | None:
        """`out` as a path."""
        return None if self.out is None else Path(self.out)


def settings_and_opening(options: Mapping[str, Any]) -> tuple[MonitorSettings, dict[str, Any]]:
    """The settings among the options, and what is left for `open_model`. ConfigError with the
    nearest name for what is neither.
    """
    own = {field.name for field in dataclasses.fields(MonitorSettings)}
    opening = {*inspect.signature(open_model).parameters} - {"model", "dtype", "dt", "on_demand", "images"}
    for name in options:
        if name not in own | opening:
            raise unknown("option of a monitor", name, own | opening)
    mine = {name: value for name, value in options.items() if name in own}
    return MonitorSettings(**mine), {name: value for name, value in options.items() if name not in own}
