"""How a screening is shown on a terminal: one page for each model, and a table for each step of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.stability.screening.predicted_rate import CAVEAT, PredictedRate
from ctrans.stability.screening.screen import Screening
from ctrans.stability.screening.screening_checks import CHECKS, STEPS, Quantity, limits_of, measured

KEY = (
    "Limits are wide: outside of them a model does nothing, explodes or cannot learn at these weights; inside of them nothing is said of "
    "which of two models ends at the lower loss. What short trainings of small architectures say of learning rates is in "
    "the site's page Does it predict training? Quantities with * are of an "
    "optimiser's step, which depends on how weights are scaled against each other; all others are the function's own."
)
NONE_OF_SGD = (
    "Of SGD's rate nothing is predicted and no upper limit is known here: a full screening gives 2/lambda_max, an estimate."
)
NAMES_APART = "A – is what was not measured; the reasons are in the notes of each model's own screening and in screen.json."


def screen_table(name: str, screening: Screening) -> Table:
    """Each step's verdict, and a row for each quantity: its value, its limits, and what it is called outside of them.

    80 columns hold it; with fewer, words are folded, and numbers stay whole as long as there is room for one.
    """
    table = Table(title=escape(f"{name}: {said(screening)}"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    table.add_column("step and quantity", overflow="fold", min_width=10)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("limits", overflow="fold", min_width=8)
    table.add_column("verdict", overflow="fold", min_width=9)
    for step, finding in screening.steps.items():
        table.add_row(step, "", "", finding.verdict, style="bold")
        for what, value in finding.quantities.items():
            word = finding.flags.get(what, "")
            number = escape(_quantity(what).shown(value, finding.errors.get(what)))
            table.add_row(f"  {_starred(what)}", number, _limits(what), _coloured(what, word))
    return table


def screen_reasons(screening: Screening) -> str:
    """Why, one sentence a step, with what helps where a quantity is outside of its limits, and what could not be computed."""
    lines = []
    fixes = {CHECKS[each.check].quantity: each.remediation for each in screening.findings}
    for name, finding in screening.steps.items():
        lines.append(f"{name}: {STEPS[name].question} {finding.why}")
        lines += [f"  {what}: {word}; what helps: {fixes[what]}" for what, word in finding.flags.items() if what in fixes]
        lines += [f"  note: {note}" for note in dict.fromkeys(finding.notes)]
    return escape("\n".join(lines))


def rate_words(screening: Screening) -> str:
    """The learning rate that is predicted, or why none is."""
    rate = screening.rate
    if rate is None:
        return escape(f"Learning rate: none predicted; {screening.no_rate}. {NONE_OF_SGD}")
    outside = f" Outside of what was studied: {'; '.join(rate.outside)}." if rate.outside else ""
    return escape(
        f"{NONE_OF_SGD} "
        f"Largest stable learning rate of AdamW, predicted: {rate.rate:.2g} ({rate.low:.2g} to {rate.high:.2g}), as learned from short "
        f"trainings of {rate.architectures} small architectures. {_checked(rate)}{outside}"
    )


def _checked(rate: PredictedRate) -> str:
    """How good such a prediction was."""
    sealed = rate.sealed
    return (
        f"Of {sealed['architectures']:g} others {sealed['in the interval']:.0%} lay in such an interval and "
        f"{sealed['within a factor of 3']:.0%} within a factor of 3. {CAVEAT}"
    )


def rates_table(screenings: Mapping[str, Screening]) -> Table:
    """A row for each model: the learning rate that is predicted, with its interval, and in what it is outside of what was studied."""
    table = Table(
        title="Largest stable learning rate of AdamW, predicted", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.title_style, table.title_justify = "bold", "left"
    table.add_column("model", overflow="fold")
    for name in ("rate", "from", "to"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outside of what was studied", overflow="fold")
    for name, screening in screenings.items():
        rate = screening.rate
        if rate is None:
            table.add_row(escape(name), "–", "–", "–", escape(screening.no_rate))
        else:
            numbers = (f"{value:.2g}" for value in (rate.rate, rate.low, rate.high))
            table.add_row(escape(name), *numbers, escape("; ".join(rate.outside) or "–"))
    return table


def comparison_tables(screenings: Mapping[str, Screening]) -> list[Table]:
    """For each step that has quantities a row for each model, in the order given: nothing is ranked."""
    return [table for step in STEPS if (table := _comparison(step, screenings)) is not None]


def by_verdict(screenings: Mapping[str, Screening]) -> dict[str, Screening]:
    """The same, those first that have fewer quantities outside of their limits; whose states are not finite, last."""
    return dict(sorted(screenings.items(), key=lambda each: (each[1].broken is not None, len(each[1].flags))))


def overview_table(screenings: Mapping[str, Screening]) -> Table:
    """A row for each model: how many quantities are outside of their limits, and which."""
    table = Table(
        title="Fewest quantities outside of their limits first", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.title_style, table.title_justify = "bold", "left"
    table.add_column("model", overflow="fold")
    table.add_column("out", justify="right", no_wrap=True)
    table.add_column("which", overflow="fold")
    for name, screening in screenings.items():
        which = "; ".join(f"{_starred(what)} {word}" for what, word in screening.flags.items())
        broken = f"not finite from segment {screening.broken}" if screening.broken is not None else which
        table.add_row(escape(name), str(len(screening.flags)), broken or "–")
    return table


def said(screening: Screening) -> str:
    """How many quantities were measured and are outside of their limits, how many are not known, and how much was found besides."""
    values = [value for finding in screening.steps.values() for value in finding.quantities.values()]
    unknown = sum(map(math.isnan, values))
    count, findings = len(values) - unknown, len(screening.diagnosis.findings)
    outside = len(screening.flags)
    if screening.broken is not None:
        return f"states are not finite from segment {screening.broken} on"
    first = (
        f"{outside} of {count} measured quantities outside of their limits"
        if outside
        else f"{count} of {count} measured quantities within limits"
    )
    others = [f"{unknown} unknown"] if unknown else []
    others += [f"{findings} finding{'s' * (findings > 1)} above"] if findings else []
    return ", ".join([first, *others])


def label(changes: Sequence[tuple[str, object]]) -> str:
    """A model's name from what sets it apart, as `peri, dt 0.1`."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) for _, value in changes]
    return ", ".join(word if name == "placement" else f"{name} {word}" for (name, _), word in zip(changes, words, strict=True))


def _comparison(step: str, screenings: Mapping[str, Screening]) -> Table | None:
    findings = {name: screening.steps[step] for name, screening in screenings.items()}
    quantities = list(dict.fromkeys(what for finding in findings.values() for what in finding.quantities))
    if not quantities:
        return None
    table = Table(title=f"{step}: {STEPS[step].question}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    table.add_column("model", overflow="fold")
    for what in quantities:
        table.add_column(_starred(what), justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for name, finding in findings.items():
        values = [_cell(finding.quantities, what, finding.flags) for what in quantities]
        table.add_row(escape(name), *values, escape(finding.verdict))
    return table


def _cell(quantities: Mapping[str, float], what: str, outside: Mapping[str, str]) -> str:
    text = escape(_quantity(what).shown(quantities[what])) if what in quantities else "–"
    return _coloured(what, text) if what in outside else text


def _coloured(what: str, text: str) -> str:
    """Red what is of the weights as they are, yellow what is of larger ones."""
    colour = "yellow" if limits_of(what)["mark"] == "note" else "red"
    return f"[{colour}]{text}[/{colour}]" if text else ""


def _starred(what: str) -> str:
    return escape(what + "*" * bool(_quantity(what).gauge))


def _quantity(what: str) -> Quantity:
    return measured().get(what, Quantity(""))


def _limits(what: str) -> str:
    """For a table: "0.01 to 10", "at most 1", or a dash."""
    low, high = limits_of(what)["low"], limits_of(what)["high"]
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else "–" if high is None else f"at most {high:g}"
