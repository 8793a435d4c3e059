"""Which weights a file lacks, in words: a prefix that all names share, or what is missing by
block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes that DataParallel, torch.compile and FSDP add to each name."""
IN_BLOCK = re.compile(r"^(.*?\.\d+)\.(.+)$")
"""The path of a block, and a name in it."""
NAMED = 3
"""How many weights, or blocks, are named."""


def without_wrappers(name: str) -> str:
    """The name without the prefixes of wrappers."""
    while name.startswith(WRAPPERS):
        prefix = next(prefix for prefix in WRAPPERS if name.startswith(prefix))
        name = name.removeprefix(prefix)
    return name


def shared_prefix(missing: Collection[str], stored: Collection[str]) -> str:
    """The prefix under which all missing weights are stored; "" if there is none."""
    prefixes = Counter(
        other.removesuffix(name)
        for name in list(missing)[:NAMED]
        for other in stored
        if other.endswith(f".{name}")
    )
    for prefix, _ in prefixes.most_common():
        if all(prefix + name in stored for name in missing):
            return prefix
    return ""


def in_words(missing: Iterable[str], stored: Collection[str], expected: Iterable[str]) -> str:
    """What is missing of the `expected` weights, for a sentence that begins with the file."""
    names = sorted(missing)
    prefix = shared_prefix(names, stored)
    if prefix:
        return (
            f"has the weights that it lacks under the prefix {prefix!r}, as a wrapper saves them:"
            f" save the inner model, or rename these weights by name.removeprefix({prefix!r})"
        )
    expected_in_block = Counter(_block(name) for name in expected)
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(_block(name), []).append(name)
    parts = []
    for block, lacking in blocks.items():
        if block and len(lacking) == expected_in_block[block]:
            parts.append(f"all {len(lacking)} weights of {block}")
        elif len(lacking) > NAMED:
            parts.append(f"{', '.join(lacking[:NAMED])} and {len(lacking) - NAMED} more")
        else:
            parts.append(", ".join(lacking))
    if len(parts) > NAMED:
        parts = [*parts[:NAMED], f"weights of {len(parts) - NAMED} more blocks"]
    return f"is not complete. It lacks {'; '.join(parts)}"


def _block(name: str) -> str:
    """The path of the block that holds the weight; "" outside of blocks."""
    found = IN_BLOCK.match(name)
    if found is None:
        return ""
    return found[1]
