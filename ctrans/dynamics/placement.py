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
    _: dataclasses.KW_ONLY
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
            "none",
            input_norm=False,
            output_norm=False,
            state_norm=False,
            velocity="f(X)",
            step="X + dt v",
            seen_in="no normalisation",
            colour="#999933",
            marker="o",
        ),
        Placement(
            "pre",
            input_norm=True,
            output_norm=False,
            state_norm=False,
            velocity="f(N_in X)",
            step="X + dt v",
            seen_in="GPT-2, Llama",
            colour="#0077bb",
            marker="s",
        ),
        Placement(
            "peri",
            input_norm=True,
            output_norm=True,
            state_norm=False,
            velocity="N_out f(N_in X)",
            step="X + dt v",
            seen_in="Gemma 2 and 3",
            colour="#009988",
            marker="D",
        ),
        Placement(
            "output",
            input_norm=False,
            output_norm=True,
            state_norm=False,
            velocity="N_out f(X)",
            step="X + dt v",
            seen_in="OLMo 2",
            colour="#ee7733",
            marker="^",
        ),
        Placement(
            "post",
            input_norm=False,
            output_norm=False,
            state_norm=True,
            velocity="tangent part of f(X)",
            step="N(X + dt f(X))",
            seen_in="original Transformer, BERT",
            colour="#cc3311",
            marker="v",
        ),
        Placement(
            "pre_post",
            input_norm=True,
            output_norm=False,
            state_norm=True,
            velocity="tangent part of f(N_in X)",
            step="N(X + dt f(N_in X))",
            seen_in="studied by Kim et al. (their A+C)",
            colour="#ee3377",
            marker="P",
        ),
        Placement(
            "deepnorm",
            input_norm=False,
            output_norm=False,
            state_norm=True,
            residual_gain=True,
            velocity="tangent part of f(X)/alpha",
            step="N(X + dt f(X)/alpha)",
            seen_in="DeepNet",
            colour="#33bbee",
            marker="X",
        ),
    )
}


UNKNOWN = Placement(
    "unknown",
    input_norm=False,
    output_norm=False,
    state_norm=False,
    velocity="not known",
    step="not known",
    seen_in="parts of other people's models that are no sums",
)
"""That of a part whose norms are inside of its map, as far as it has any."""


def placement_with(
    *, input_norm: bool, output_norm: bool, state_norm: bool, gain: bool = False
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
        descriptions = ("an input norm", "an output norm", "a norm around the state")
        norms_on = " and ".join(itertools.compress(descriptions, norms))
        raise ConfigError(
            f"a sublayer has {norms_on}, and no placement does: leave one out, or add an entry to"
            " PLACEMENTS"
        )
    for placement in matching:
        if placement.residual_gain == gain:
            return placement
    return matching[0]


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


def spell(spelling: Spelling) -> str:
    """The placements of a model as one text, the same for equal placements.

    - a name such as "peri" applies to all sublayers of any number of blocks; the tuple ("post",
      "pre") or "post/pre" is for attention and FFN (HybridNorm)
    - a list has an entry for each block (Mix-LN), and the text counts runs of equal ones:
      "post*3+pre/output*9". So ["pre"] is one block, "pre*1", and ["post", "pre"] two

    Raises ConfigError for anything else, and for unknown names.
    """
    if isinstance(spelling, str):
        text = spelling
    elif isinstance(spelling, tuple) and _is_pair(spelling):
        text = "/".join(spelling)
    elif isinstance(spelling, list) and spelling and all(_is_entry(entry) for entry in spelling):
        text = _text_of_blocks(spelling)
    else:
        raise ConfigError(
            f"placement = {shown(spelling)}: give a name for all blocks, a tuple of two names for"
            " attention and FFN, or a list with one of these for each block"
        )
    return "+".join(_spelt(pair, count) for pair, count in _runs(text))


def _text_of_blocks(entries: list[str | tuple[str, str] | list[str]]) -> str:
    """A text that counts the runs of equal entries, from one entry for each block."""
    names = []
    for entry in entries:
        if isinstance(entry, str):
            name = entry
        else:
            name = "/".join(entry)
        if "*" in name or "+" in name:
            raise ConfigError(
                f"placement {shown(name)} is an entry of a list, which has one entry for each"
                " block: leave the count out"
            )
        names.append(name)
    return "+".join(f"{name}*{len(list(run))}" for name, run in itertools.groupby(names))


def spell_for(spelling: Spelling, blocks: int) -> str:
    """The same for a model of this many blocks, without a count if all blocks are equal. Raises
    ConfigError for another number of blocks.
    """
    text = spell(spelling)
    check_arrangement(text, blocks)
    runs = _runs(text)
    if len(runs) == 1:
        pair, _ = runs[0]
        return _spelt(pair, None)
    return text


def arrange(text: str, blocks: int) -> list[BlockPlacement]:
    """The placements of each block, from a text of `spell`. Raises ConfigError for another number
    of blocks.
    """
    check_arrangement(text, blocks)
    arrangement = []
    for pair, count in _runs(text):
        if count is None:
            count = blocks
        arrangement.extend([pair] * count)
    return arrangement


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
    by_name = {placement.name: placement for pair, _ in _runs(text) for placement in pair}
    return list(by_name.values())


def _is_entry(value: object) -> bool:
    """Whether the value may describe a block: a name or a pair of names."""
    return isinstance(value, str) or _is_pair(value)


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(name, str) for name in value)
    )


def _spelt(pair: BlockPlacement, count: int | None) -> str:
    if pair.attention.name == pair.ffn.name:
        name = pair.attention.name
    else:
        name = f"{pair.attention.name}/{pair.ffn.name}"
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
        attention, ffn, count_text = match.groups()
        pair = BlockPlacement(get_placement(attention), get_placement(ffn or attention))
        if count_text is None and len(parts) == 1:
            return [(pair, None)]
        if count_text is None:
            count_text = "1"
        if not re.fullmatch(r"0*[1-9][0-9]{0,5}", count_text):
            raise ConfigError(
                f"placement {shown(text)}: {shown('*' + count_text)} is no number of blocks: give a"
                f" whole number from 1 to {MOST_BLOCKS} after each *"
            )
        count = int(count_text)
        if runs and runs[-1][0] == pair:
            _, previous_count = runs.pop()
            count += previous_count or 0
        runs.append((pair, count))
    if sum(count or 0 for _, count in runs) > MOST_BLOCKS:
        raise ConfigError(
            f"placement {shown(text)} counts more than {MOST_BLOCKS} blocks: give a name for all"
            " blocks, or fewer"
        )
    return runs
