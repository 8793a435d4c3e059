"""Which weights of a distributed checkpoint are the model's, where a training saved several
dictionaries of weights: as for a file of torch.save (`weights_in_objects`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ctrans.interop.weights_in_objects import HOLDERS
from solvers import ConfigError, shown

Keys = tuple[Any, ...]
"""The keys of the dictionaries around a tensor, from the outermost to its own."""


def names_of_model(
    path: Path, names: Collection[str], keys_of: Mapping[str, Any]
) -> tuple[set[str], list[str]]:
    """The names of the model's weights, and the entries that are left out: those next to the
    dictionary of weights. `keys_of` are the keys of each name, as far as the checkpoint says them.

    Raises ConfigError where two dictionaries may be the model's.
    """
    chosen = {name: _keys(name, keys_of) for name in names}
    left_out: list[str] = []
    while chosen:
        dictionaries = {keys[0] for keys in chosen.values() if len(keys) > 1}
        holders = [key for key in HOLDERS if key in dictionaries]
        if len(holders) > 1:
            raise ConfigError(
                f"{str(path)!r} holds weights under {holders[0]!r} and under {holders[1]!r}: save"
                " one of the two"
            )
        if not holders:
            break
        holder = holders[0]
        others = [keys[0] for keys in chosen.values() if keys[0] != holder]
        left_out += map(shown, others)
        chosen = {name: keys[1:] for name, keys in chosen.items() if keys[0] == holder}
    return set(chosen), list(dict.fromkeys(left_out))


def _keys(name: str, keys_of: Mapping[str, Any]) -> Keys:
    """The keys of a name; the name alone, if the checkpoint does not say them."""
    keys = keys_of.get(name)
    if isinstance(keys, tuple) and keys and all(isinstance(key, (str, int)) for key in keys):
        return keys
    return (name,)
