"""The penalty of the weights that a model needs, as `ctrans hjb-check` shows it."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator

from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.model_check import ModelCheck
from ctrans.measure.measured import Value

NO_PENALTY = "none"


def penalties(model: str, measure: str, threshold: DecayThreshold | None) -> Iterator[Value]:
    """The penalty that is proven to suffice, and the one that was found to be too small."""
    if threshold is None:
        yield Value(model, measure, None)
        return
    if math.isinf(threshold.lower):
        yield Value(model, measure, None, words=NO_PENALTY)
        return
    if math.isinf(threshold.upper):
        low, _ = _two_digits(threshold.lower, decimal.ROUND_FLOOR)
        yield Value(model, measure, None, words=f"> {low}")
    else:
        high, _ = _two_digits(threshold.upper, decimal.ROUND_CEILING)
        yield Value(model, measure, threshold.upper, words=high)
    yield Value(model, "penalty too small", threshold.lower)


def penalty(threshold: DecayThreshold) -> str:
    """dt lam*, from what was found to what is proven where these differ."""
    lower = threshold.lower
    upper = threshold.upper
    if math.isinf(upper):
        return f"≥ {_two_digits(lower, decimal.ROUND_FLOOR)[0]}"
    low, power = _two_digits(lower, decimal.ROUND_FLOOR)
    high, power_of_high = _two_digits(upper, decimal.ROUND_CEILING)
    if power and power == power_of_high:  # one power for both takes less room
        low = low.removesuffix(power)
    if low == high or f"{low}{power}" == high:
        return high
    return f"{low}-{high}"


def _two_digits(value: float, rounding: str) -> tuple[str, str]:
    """A number in two digits, rounded away from the interval that it ends, and its power of ten if
    it is written with one.
    """
    exact = decimal.Decimal(value)
    if exact == 0:
        return "0", ""
    last_digit = decimal.Decimal(1).scaleb(exact.adjusted() - 1)
    rounded = exact.quantize(last_digit, rounding=rounding)
    exponent = rounded.adjusted()
    if -2 <= exponent <= 2:
        return f"{float(rounded):.4g}", ""
    power = f"e{exponent}"
    return f"{float(rounded.scaleb(-exponent)):.1f}{power}", power


def why_no_penalty(check: ModelCheck) -> str:
    """Why the penalty that a model needs is not known; "" if it is, or if none is needed."""
    if check.no_threshold or check.training_threshold is not None:
        return check.no_threshold
    without_paths = sum(
        segment.certificate.verdict == "degenerate" and segment.threshold is None
        for segment in check.segments
    )
    if not without_paths:
        return not_examined(check)
    return (
        f"in {without_paths} of {len(check.segments)} segments ctrans does not find the matrices"
        " whose product the map is"
    )


def not_examined(check: ModelCheck) -> str:
    """How many segments were skipped, and what that leaves unknown; "" if none was."""
    count = len(check.missing)
    if not count:
        return ""
    of_all = count + len(check.segments)
    return f"{count} of {of_all} parts were skipped, and may need a penalty too"


def decay_notes(check: ModelCheck) -> list[str]:
    """What the weight decay asked about does, and what no weight decay can do."""
    threshold = check.training_threshold
    decay = check.largest.weight_decay
    if decay is None:
        return []
    unknown = why_no_penalty(check)
    if unknown:
        return [f"the penalty that H needs is not known: {unknown}"]
    if threshold is None:
        return []
    if math.isinf(threshold.lower):
        return [
            "no penalty makes H finite: a gated or squared FFN multiplies three factors, and its"
            " value grows like R^3 against a cost of R^2"
        ]
    is_needed = f"dt lam* is {penalty(threshold)}"
    if not any(segment.needs_penalty for segment in check.segments):
        is_needed = f"read as an ODE, whose dt lam* is {penalty(threshold)}"
    if decay < threshold.lower:
        times = f"{threshold.lower / decay:.3g}"
        if times == "1":
            lines = [f"a penalty of {decay:g} is just too small for a finite H: {is_needed}"]
        elif times == "inf":
            lines = [f"a penalty of {decay:g} is far too small for a finite H: {is_needed}"]
        else:
            lines = [
                f"a penalty of {decay:g} is {times} times too small for a finite H: {is_needed}"
            ]
    elif check.missing:
        lines = [f"whether a penalty of {decay:g} suffices is not known: {not_examined(check)}"]
    elif decay < threshold.upper:
        lines = [
            f"a penalty of {decay:g} is between the dt lam* that was found and what is proven to"
            f" suffice: {is_needed}"
        ]
    else:
        lines = [f"a penalty of {decay:g} keeps the matrices from running away: {is_needed}"]
    if threshold.bias > 0:
        lines.append(
            "biases without decay make H infinite whatever the penalty, as dt |sum_j p_j| ="
            f" {threshold.bias:.2g} is not 0"
        )
    if threshold.gains:
        lines.append(
            "trained gains, of an input norm, a residual or others outside of the matrices, can"
            " make H infinite too: as a third factor they let the value grow like R^3"
        )
    return lines
