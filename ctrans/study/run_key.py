"""What a run is called in a store: a hash of all that decides its result, which stays when ctrans gains options.

A run has a value for every field of `GPTConfig` and of `TrainConfig`, and its key hashes the values, not the defaults: a default that
changes makes another run. A field that came after the first stores is left out of the key where it has the value that says "as before
there was this field", `BEFORE`, so that what was kept then is the same run still. That value is written down once and never follows
the field's default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

BEFORE: dict[str, dict[str, Any]] = {"model": {}, "training": {}}
"""A field that is new in `GPTConfig` ("model") or `TrainConfig` ("training") gets an entry here: the value with which ctrans does what
it did before.
"""


def run_key(model: Mapping[str, Any], training: Mapping[str, Any], fingerprint: str, measure: tuple[str, ...]) -> str:
    """SHA-256 of the fields of both, of the data's fingerprint, and of what is measured where something is."""
    settings: dict[str, Any] = {"model": _needed("model", model), "training": _needed("training", training), "data": fingerprint}
    settings |= {"measure": sorted(measure)} if measure else {}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def as_now(kind: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a kept run with those that came since."""
    return {**BEFORE[kind], **kept}


def _needed(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    before = BEFORE[kind]
    return {name: value for name, value in fields.items() if name not in before or value != before[name]}
