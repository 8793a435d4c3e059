"""Placements of normalisation, defined by equations: which norms act where, in a sublayer and in a
model.

Names differ between papers and libraries ("sandwich" has three meanings). So a placement here is
defined by its norms: N_in before the sublayer's map f, N_out after it, N_state around the residual
sum (Kim's positions A, B and C).

A new placement is one entry of `PLACEMENTS`, which models, commands, figures and tests then use.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import NamedTuple

from solvers import ConfigError, look_up, shown


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which norms surround a sublayer's map f, and what follows for the model.

    The raw velocity is r(X) = N_out f(N_in X), each norm only if it is on. The discrete step is X +
    dt r(X), or N_state(X + dt r(X)) with `state_norm`. The ODE's velocity is r, or its part tangent
    to N_state's image. `colour` and `marker` are matplotlib's names for its lines in all figures.
    `velocity`, `step` and `seen_in` (models with this placement) are its row of the table in
    docs/commands/architecture.md.
    """

    name: str
    input_norm: bool
    output_norm: bool
    state_norm: bool
    velocity: str
    step: str
    seen_in: str
    colour: str = "0.4"
    marker: str = "*"
    residual_gain: bool = False
    """Whether f is divided by DeepNorm's alpha."""

    @property
    def final_norm(self) -> bool:
        """Whether a norm acts before the head: always, unless the state itself is normalised
        (Xiong, table 1).
        """
        return not self.state_norm


# colours for any colour vision: Paul Tol's vibrant scheme, and his olive
PLACEMENTS: dict[str, Placement] = {
    placement.name: placement
    for placement in (
        Placement(
            "none", False, False, False, "f(X)", "X + dt v", "no normalisation", "#999933", "o"
        ),
        Placement(
            "pre", True, False, False, "f(N_in X)", "X + dt v", "GPT-2, Llama", "#0077bb", "s"
        ),
        Placement(
            "peri",
            True,
            True,
            False,
            "N_out f(N_in X)",
            "X + dt v",
            "Gemma 2 and 3",
            "#009988",
            "D",
        ),
        Placement("output", False, True, False, "N_out f(X)", "X + dt v", "OLMo 2", "#ee7733", "^"),
        Placement(
            "post",
            False,
            False,
            True,
            "tangent part of f(X)",
            "N(X + dt f(X))",
            "original Transformer, BERT",
            "#cc3311",
            "v",
        ),
        Placement(
            "pre_post",
            True,
            False,
            True,
            "tangent part of f(N_in X)",
            "N(X + dt f(N_in X))",
            "studied by Kim et al. (their A+C)",
            "#ee3377",
            "P",
        ),
        Placement(
            "deepnorm",
            False,
            False,
            True,
            "tangent part of f(X)/alpha",
            "N(X + dt f(X)/alpha)",
            "DeepNet",
            "#33bbee",
            "X",
            residual_gain=True,
        ),
    )
}


def placement_with(
    input_norm: bool, output_norm: bool, state_norm: bool, *, gain: bool = False
) -> Placement:
    """The placement with exactly these norms; `gain` chooses between those with and without a
    residual gain.

    Raises ConfigError with the norms if `PLACEMENTS` has no such entry.
    """
    norms = (input_norm, output_norm, state_norm)
    matching = [
        p for p in PLACEMENTS.values() if (p.input_norm, p.output_norm, p.state_norm) == norms
    ]
    if not matching:
        words = ("an input norm", "an output norm", "a norm around the state")
        on = " and ".join(word for word, there in zip(words, norms, strict=True) if there)
        raise ConfigError(
            f"a sublayer has {on}, and no placement does: leave one out, or add an entry to"
            " PLACEMENTS"
        )
    return min(matching, key=lambda p: p.residual_gain != gain)


def get_placement(name: str) -> Placement:
    """The placement of that name. Raises ConfigError with the nearest name for an unknown one."""
    return look_up("placement", name, PLACEMENTS)


class BlockPlacement(NamedTuple):
    """The placements of a block's two sublayers."""

    attention: Placement
    ffn: Placement


Spelling = str | tuple[str, str] | list[str | tuple[str, str] | list[str]]
"""How to write a model's placements: "peri"; the tuple ("post", "pre") for attention and FFN; or a
list with one of these for each block. `spell` makes a text of them.
"""

MOST_BLOCKS = 999_999
"""The largest number of blocks that a text can count."""


def spell(given: Spelling) -> str:
    """The placements of a model as one text, the same for equal placements.

    - a name such as "peri" applies to all sublayers of any number of blocks; the tuple ("post",
      "pre") or "post/pre" is for attention and FFN (HybridNorm)
    - a list has an entry for each block (Mix-LN), and the text counts runs of equal ones:
      "post*3+pre/output*9". So ["pre"] is one block, "pre*1", and ["post", "pre"] two

    Raises ConfigError for anything else, and for unknown names.
    """
    if isinstance(given, str):
        text = given
    elif isinstance(given, tuple) and _is_pair(given):
        text = "/".join(given)
    elif (
        isinstance(given, list)
        and given
        and all(isinstance(entry, str) or _is_pair(entry) for entry in given)
    ):
        each = [entry if isinstance(entry, str) else "/".join(entry) for entry in given]
        if counted := next((name for name in each if set("*+") & set(name)), None):
            raise ConfigError(
                f"placement {shown(counted)} is an entry of a list, which has one entry for each"
                " block: leave the count out"
            )
        text = "+".join(f"{name}*{len(list(same))}" for name, same in itertools.groupby(each))
    else:
        raise ConfigError(
            f"placement = {shown(given)}: give a name for all blocks, a tuple of two names for"
            " attention and FFN, or a list with one of these for each block"
        )
    return "+".join(_spelt(*run) for run in _runs(text))


def spell_for(given: Spelling, blocks: int) -> str:
    """The same for a model of this many blocks, without a count if all blocks are equal. Raises
    ConfigError for another number of blocks.
    """
    text = spell(given)
    check_arrangement(text, blocks)
    runs = _runs(text)
    if len(runs) == 1:
        return _spelt(runs[0][0], None)
    return text


def arrange(text: str, blocks: int) -> list[BlockPlacement]:
    """The placements of each block, from a text of `spell`. Raises ConfigError for another number
    of blocks.
    """
    check_arrangement(text, blocks)
    return [pair for pair, count in _runs(text) for _ in range(blocks if count is None else count)]


def check_arrangement(text: str, blocks: int) -> None:
    """Raises ConfigError unless the text fits this number of blocks."""
    counts = [count for _, count in _runs(text)]
    described = sum(count or 0 for count in counts)
    if None in counts or described == blocks:
        return
    pairs = [_spelt(pair, None) for pair, _ in _runs(text)]
    fix = "make them agree"
    if len(pairs) == 1:
        fix += f", or give {pairs[0]!r} for all blocks"
    elif described == 2 and "/" not in text:
        fix += (
            f", or give {'/'.join(pairs)!r} for attention and FFN (in Python the tuple"
            f" {tuple(pairs)}; a list goes by blocks)"
        )
    if described == 1:
        number = "1 block"
    else:
        number = f"{described} blocks"
    raise ConfigError(f"placement {shown(text)} is for {number} and the model has {blocks}: {fix}")


def placements_in(text: str) -> list[Placement]:
    """The different placements of a text, in order."""
    return list(
        {placement.name: placement for pair, _ in _runs(text) for placement in pair}.values()
    )


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(name, str) for name in value)
    )


def _spelt(pair: BlockPlacement, count: int | None) -> str:
    attention, ffn = (placement.name for placement in pair)
    if attention == ffn:
        name = attention
    else:
        name = f"{attention}/{ffn}"
    if count is None:
        return name
    return f"{name}*{count}"


def _runs(text: str) -> list[tuple[BlockPlacement, int | None]]:
    """Pairs of placements, each with the number of consecutive blocks; one pair with None for a
    text without counts.
    """
    runs: list[tuple[BlockPlacement, int | None]] = []
    parts = text.split("+")
    for part in parts:
        match = re.fullmatch(r"([^*/]+)(?:/([^*/]+))?(?:\*([^*/]*))?", part)
        if match is None:
            raise ConfigError(
                f"placement {shown(text)}: give a name, two as post/pre for attention and FFN, or"
                " blocks as post*3+pre*9"
            )
        attention, ffn, counted = match.groups()
        pair = BlockPlacement(get_placement(attention), get_placement(ffn or attention))
        if counted is None and len(parts) == 1:
            return [(pair, None)]
        if counted is None:
            counted = "1"
        else:
            counted = counted
        if not re.fullmatch(r"0*[1-9][0-9]{0,5}", counted):
            raise ConfigError(
                f"placement {shown(text)}: {shown('*' + counted)} is no number of blocks: give a"
                f" whole number from 1 to {MOST_BLOCKS} after each *"
            )
        count = int(counted)
        if runs and runs[-1][0] == pair:
            count += runs.pop()[1] or 0
        runs.append((pair, count))
    if sum(count or 0 for _, count in runs) > MOST_BLOCKS:
        raise ConfigError(
            f"placement {shown(text)} counts more than {MOST_BLOCKS} blocks: give a name for all"
            " blocks, or fewer"
        )
    return runs
