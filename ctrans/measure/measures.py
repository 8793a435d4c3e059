"""What can be measured: the one table `MEASURES`.

A measure is a figure of a model or of its training. Its entry says the formula, the unit, the
source, what the figure is of (`scope`), how it is computed, and its limits. Findings, alarms,
charts, tables, the JSON and the documentation follow from the entry.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ctrans.measure.findings import Check, Checks
from solvers import ConfigError, look_up
from solvers.errors import shown

Scope = Literal["run", "state", "sublayer", "head", "weight", "token", "size"]
"""What a figure is of.

- run: the whole model, or the whole training
- state: X_k, for k = 0 to the number of segments
- sublayer: segment k, or its sublayer
- head: a head of an attention, counted through the depth
- weight: a weight by its name, or a norm, or a block
- token: a token of the text
- size: a size that is varied, such as the learning rate or the number of steps
"""
Figures = dict[str, float | list[float]]
"""Figures by measure: a number for one of the run, else a list by place; nan is unknown."""
MeasureAt = tuple[str, int]
"""A measure, and the number of the place where it is taken."""
MOST_DECIMALS = 1000.0
"""From this size on, a value has three digits instead of fixed decimals."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure that ctrans measures.

    - `formula`: the figure as a formula, in words or signs
    - `title`: its name in tables and charts; empty for the name of its entry
    - `unit`: the unit, or what the axis of a chart says
    - `scope`: what it is of
    - `topic`: the question that it helps to answer, under which tables show it
    - `source`: who defined it; empty for ctrans
    - `compute`: a plain function of what the scope hands over, or the class of the instrument of a
      walk (or of several) that has it; None if a driver measures it (`measured_by`)
    - `measured_by`: the instrument or the function that measures it, in a word
    - `key`: its name in the object of the driver that has it, and in the JSON of version 1
    - `live`: whether a training's hooks take it too, for the monitor
    - `studied`: whether a study may take it of a model before and after its training: `compute` is
      then a function of the model, tokens and targets to JSON values
    - `compares`: the measures of which `compute` compares two readings, the earlier and the later
    - `checks`: by name, the limits, what follows beyond them, and what helps
    - `bounds`: the measure on which this one is a bound; it is drawn dashed in that one's chart
    - `end`: which end of an interval around that measure this one is, where it is no bound
    - `over`: what the steps of a figure of scope `size` count, and whether that axis is logarithmic
    - `log`: whether the axis of a chart is logarithmic at first
    - `slope`: what theory says the slope of its curve is where both axes are logarithmic; the chart
      has a line of that slope
    - `share`: whether it is shown in per cent
    - `decimals`: the number of decimals, for exponents; None for three digits
    - `gauge`: why two models of the same function may differ in it; empty if they do not
    - `detail`: whether only --verbose and the page show it
    - `charted`: whether it has a chart, and `drawn`: how the chart shows it
    - `picture`: the PNG file of its charts, without the suffix; empty for that of the command
    - `against`: the measure along whose values it is drawn, as points
    - `marked`: whether a value above this is marked as wrong
    - `shown_by`: what tables show: the value; its words, as text; or its words as an interval,
      sorted by the value
    - `subject`: what has this figure: the heading over the names of a table's rows
    """

    formula: str
    title: str = ""
    unit: str = ""
    scope: Scope = "run"
    topic: str = ""
    source: str = ""
    compute: Callable[..., Any] | tuple[Callable[..., Any], ...] | None = None
    measured_by: str = ""
    key: str = ""
    live: bool = False
    studied: bool = False
    compares: tuple[str, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    bounds: str = ""
    end: Literal["", "low", "high"] = ""
    over: str = ""
    log: bool = True
    log_x: bool = False
    slope: float | None = None
    share: bool = False
    decimals: int | None = None
    gauge: str = ""
    detail: bool = False
    charted: bool = True
    drawn: Literal["lines", "bars"] = "lines"
    picture: str = ""
    against: str = ""
    marked: float | None = None
    shown_by: Literal["value", "words", "interval"] = "value"
    subject: str = "model"

    @property
    def is_plain(self) -> bool:
        """Whether `compute` is a plain function of what the scope hands over."""
        is_function = callable(self.compute) and not isinstance(self.compute, type)
        return is_function and not self.studied and not self.compares

    def shown(self, value: float, error: float | None = None) -> str:
        """The value as text, with its error if given."""
        if math.isnan(value):
            return "unknown"
        if self.share:
            if value < 10:
                return f"{value:.0%}"
            return f"{value:.1g}x"
        fixed = self.decimals is not None and abs(value) < MOST_DECIMALS
        if fixed:
            number = f"{round(value, self.decimals) + 0.0:.{self.decimals}f}"
        else:
            number = f"{value:.3g}"
        if error:
            return f"{number} ± {error:.1g}"
        return number


OF_A_RUN = "run: "
"""How the name of a measure of a run of a study begins, which a preset compares."""


class Measures(UserDict[str, Measure]):
    """Measures by name. Raises ConfigError for one that nothing computes: see `_check_computed`."""

    def __setitem__(self, name: str, measure: Measure) -> None:
        if not isinstance(measure, Measure):
            raise ConfigError(
                f"MEASURES[{name!r}] = {shown(measure)}: give a Measure(formula=...,"
                " compute=FUNCTION); a function of a study has studied=True too"
            )
        look_up("scope", measure.scope, dict.fromkeys(get_args(Scope)))
        if measure.bounds and measure.bounds not in self:
            raise ConfigError(
                f"the measure {name!r} bounds {measure.bounds!r}, which is not in the table:"
                " register that one first"
            )
        checks = _of_measure(name, measure, "")
        for word, check in checks.items():
            if "training" in check.topics and check.rule is None:
                raise ConfigError(
                    f"the alarm {word!r} of the measure {name!r} has no rule over the past: give"
                    " Check(rule=FUNCTION)"
                )
        _check_computed(name, measure)
        super().__setitem__(name, replace(measure, checks=checks))

    def add(
        self,
        measured_by: str,
        measures: Mapping[str, Measure],
        *,
        topic: str = "",
        picture: str = "",
    ) -> None:
        """Registers several measures that one instrument or function computes. `topic` is the
        analysis that judges their checks, `picture` that of the measures without one. Raises
        ConfigError for a name that is taken.
        """
        for name, measure in measures.items():
            if name in self:
                raise ConfigError(
                    f"the measure {name!r} is in the table already: choose another name"
                )
            self[name] = replace(
                measure,
                measured_by=measure.measured_by or measured_by,
                picture=measure.picture or picture,
                checks=_of_measure(name, measure, topic),
            )

    def limit(self, topic: str, checks: Mapping[str, Mapping[str, Check]]) -> None:
        """Adds checks to measures of earlier rooms, by measure and name."""
        for name, more in checks.items():
            added = _of_measure(name, replace(self[name], checks=more), topic)
            self[name] = replace(self[name], checks={**self[name].checks, **added})

    def checks(self, topic: str) -> dict[str, Check]:
        """The checks that an analysis judges, by name."""
        return {
            name: check
            for measure in self.values()
            for name, check in measure.checks.items()
            if topic in check.topics
        }

    def keyed(self, measured_by: str, *, scope: Scope = "run", topic: str = "") -> dict[str, str]:
        """The keys of what one instrument or function measures, by measure. Those of a `topic` if
        one is given; none of a bound.
        """
        return {
            name: measure.key
            for name, measure in self.items()
            if measure.key
            and not measure.bounds
            and measure.measured_by == measured_by
            and measure.scope == scope
            and topic in ("", measure.topic)
        }

    def title(self, name: str) -> str:
        """What tables and charts call a measure. An unknown name stands for itself."""
        measure = self.get(name)
        if measure is None or not measure.title:
            return name
        return measure.title


def _of_measure(name: str, measure: Measure, topic: str) -> dict[str, Check]:
    """The checks of a measure, which know its name, its formula and the topic."""
    return {
        word: replace(
            check,
            quantity=name,
            description=check.description or measure.formula,
            topics=check.topics or (topic or _usual_topic(check),),
        )
        for word, check in measure.checks.items()
    }


def _usual_topic(check: Check) -> str:
    if check.rule is not None:
        return "training"
    return "diagnosis"


MEASURES = Measures()
"""All measures by name, in the order of reports."""


def _check_computed(name: str, measure: Measure) -> None:
    """Raises ConfigError if nothing computes the measure. Of plain functions a diagnosis computes
    those of states and sublayers that have a check, a training those that are `live`, and a study
    those that are `studied` or that its presets compare.
    """
    if measure.studied and (not callable(measure.compute) or measure.scope != "run"):
        raise ConfigError(
            f"the measure {name!r} is studied=True: give compute=FUNCTION of a model, tokens and"
            " targets, and scope='run'"
        )
    if measure.measured_by:
        return
    if not measure.compute:
        raise ConfigError(
            f"nothing computes the measure {name!r}: give it compute=FUNCTION, or measured_by="
            "the instrument that has its figures"
        )
    if not measure.is_plain or measure.live or name.startswith(OF_A_RUN):
        return
    if measure.scope not in ("state", "sublayer"):
        raise ConfigError(
            f"nothing hands a {measure.scope} to the function of the measure {name!r}: give"
            " scope='state' or 'sublayer', live=True for a training, studied=True for a study, or"
            " the class of an Instrument as compute"
        )
    if not measure.checks:
        raise ConfigError(
            f"nothing computes the measure {name!r}: a diagnosis computes functions that have a"
            " limit, so give checks=, or live=True for a training"
        )


class Chosen(Mapping[str, Measure]):
    """The measures for which `belongs` holds, by name, as they are now: a plugin may add some."""

    def __init__(self, belongs: Callable[[Measure], bool]):
        self._belongs = belongs

    def __getitem__(self, name: str) -> Measure:
        measure = MEASURES[name]
        if not self._belongs(measure):
            raise KeyError(name)
        return measure

    def __iter__(self) -> Iterator[str]:
        return (name for name, measure in MEASURES.items() if self._belongs(measure))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def checks_of(topic: str) -> Checks:
    """The checks of the measures of a topic, by name."""
    return Checks(topic, lambda: MEASURES.checks(topic))
