"""The rules of PROTOCOL-2.md, each a question about a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.clinic.faults import Fault
from benchmarks.clinic.judging import CATEGORIES, MANY_CAUSES, names, outcome, tolerance, wilson
from benchmarks.clinic.report import loud
from benchmarks.clinic.seal import SECOND
from benchmarks.clinic.second_examine import BY_SEARCH, NO_PATIENT
from benchmarks.clinic.second_model_faults import ADDED as NEW_MODEL_FAULTS
from benchmarks.clinic.second_training_faults import ADDED as NEW_TRAINING_FAULTS

Row = Mapping[str, Any]
NEEDS = 0.1
"""Nats above the control's loss from which a patient needs a fix."""


def loss(value: float | None) -> float:
    """A kept loss; None stands for one that is not finite."""
    return math.inf if value is None else value


def fault_of(row: Row) -> Fault:
    return SECOND.fault(row["kind"], row["fault"])


def is_patient(row: Row) -> bool:
    return bool(row["fault"]) and row["ending"] != NO_PATIENT


def is_new(row: Row) -> bool:
    return row["fault"] in (NEW_MODEL_FAULTS | NEW_TRAINING_FAULTS)


def costs(row: Row) -> bool:
    """Whether the fault raises the held-out loss by more than `NEEDS`."""
    if row["kind"] == "model":
        return loss(row.get("loss")) > row.get("healthy", 0.0) + NEEDS
    arms = row["arms"]
    return not arms or loss(arms["none"]) > arms["healthy"] + NEEDS


def needs_fix(row: Row) -> bool:
    return costs(row) or fault_of(row).wrong_by_definition


def refusal_names_it(row: Row) -> bool:
    message = row.get("refused") or ""
    return any(check in message for check in CATEGORIES[fault_of(row).category])


def found(row: Row) -> bool:
    return bool(row["found"]) or refusal_names_it(row)


def found_above_note(row: Row) -> bool:
    return loud(row["found"]) or refusal_names_it(row)


def restored_by_search(row: Row) -> bool:
    """Whether the loss with the edits is the control's."""
    if not row.get("edits"):
        return False
    return loss(row["loss with edits"]) <= row["healthy"] + tolerance(row["healthy"])


def names_cause(row: Row, check: str) -> bool:
    if check == BY_SEARCH:
        return restored_by_search(row)
    return names(fault_of(row).category, check)


def cause_first(row: Row) -> bool:
    if not row["found"]:
        return refusal_names_it(row)
    return names_cause(row, row["found"][0][0])


def one_cause_first(row: Row) -> bool:
    """As `cause_first`, without the checks whose text names several causes."""
    is_vague = bool(row["found"]) and row["found"][0][0] in MANY_CAUSES
    return cause_first(row) and not is_vague


def cause_named(row: Row) -> bool:
    return refusal_names_it(row) or any(names_cause(row, each[0]) for each in row["found"])


def placed(row: Row) -> bool:
    right = [each for each in row["found"] if names_cause(row, each[0])] or row["found"]
    if not right:
        return False
    check, _, place, _ = right[0]
    return fault_of(row).place in place or (check == BY_SEARCH and names_cause(row, check))


def after(row: Row, arm: str) -> str:
    """The outcome of an arm."""
    arms = {name: loss(value) for name, value in row["arms"].items()}
    return outcome(arms[arm], arms["none"], arms["healthy"])


def advised(row: Row) -> bool:
    """Whether the advice of the first finding is an act that code can do."""
    return bool(row["found"]) and row["treatments"]["advice"] not in (None, "nothing")


def healed_by_advice(row: Row) -> bool:
    return advised(row) and after(row, "advice") == "healed"


def healed(row: Row) -> bool:
    return restored_by_search(row) or healed_by_advice(row)


def harmed(row: Row) -> bool:
    if row.get("edits"):
        return loss(row["loss with edits"]) > loss(row["loss"]) + tolerance(row["healthy"])
    return advised(row) and after(row, "advice") == "harm"


def verdict(hits: int, of: int, target: float, *, at_least: bool) -> str:
    """What PROTOCOL-2.md calls a share: met, not met, refuted."""
    low, high = wilson(hits, of)
    is_refuted = high < target if at_least else low > target
    if is_refuted:
        return "refuted"
    share = hits / max(1, of)
    is_met = share >= target if at_least else share <= target
    return "met" if is_met else "not met"
