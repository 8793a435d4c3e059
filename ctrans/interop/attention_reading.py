"""Reads a foreign attention: where its heads' matrices are and how its scores are computed. It uses
what the module computes, not names.

The module runs on random states in the library's mode that returns the attention rows a_h. The
order and shapes of its linear maps give candidates. A candidate counts only if it reproduces the
output:

- values: the heads' averages equal sum_j a_hij (V_g x_j + b_v), where g is the group of head h.
  Then f(x)_i = sum_h O_h (average) + b_o, as its last linear map was seen to act on them
- scores: log a_hij = scale <Q_h x_i + b_q, K_g x_j + b_k> + c_hij + a constant for each row; with a
  soft-cap c, the first term passes c tanh(./c). c_hij is the score at x = 0: ALiBi, or a table of
  relative positions. It does not depend on the state, so derivatives ignore it
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.interop.attention_rows import LastRows, seeing_rows, sum_to_one
from ctrans.interop.attention_scores import ROTARY, Scores, at_one_position, by_head
from ctrans.interop.changed_tokens import RowsAndOutputs, with_other_tokens
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.module_chain import JoinedProjections, ModuleChain, Projection, is_linear
from ctrans.interop.norms import as_norm, named_norms
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import difference, tolerance

CROSSING = (
    "its rows weigh other tokens than those of the state alone (cross-attention, or a memory beside"
    " them)"
)
NO_ROWS = "averages no tokens by rows that are known"
SOFT_CAPS = ("attn_logit_softcapping", "logit_softcapping")
"""Attributes that hold a soft-cap."""


@dataclass(frozen=True)
class AttentionReading:
    """Where Q, K, V and O are, with `heads` heads of which `heads // groups` share a key and a
    value.

    - `whole_rows`: whether rows sum to 1
    - `scale`: the factor of bilinear scores; None if scores are not bilinear
    - `key_offsets`: whether the offsets of keys can change the rows
    - `position_scores`: whether positions add a number to bilinear scores, as ALiBi's do
    - `rows_alone`: whether rows sum to 1 as a `RowsReading` finds, though weights of unknown effect
      are in the attention
    - `why_not`: how it differs from an ordinary attention, or ""
    """

    query: Projection | JoinedProjections
    key: Projection | JoinedProjections
    value: Projection | JoinedProjections
    out: Projection
    heads: int
    groups: int
    whole_rows: bool
    scale: float | None
    key_offsets: bool
    position_scores: bool
    why_not: str
    rows_alone: bool = False


See = Callable[[LastRows], Tensor | None]
"""Which rows of a pass are those of a map; None if it has none."""


@dataclass(frozen=True)
class RowsReading:
    """An attention whose rows alone are known: `heads` of them for each token. `why_not` says why
    its matrices are not, and `see` gives the rows of a pass.
    """

    heads: int
    why_not: str
    see: See


Candidate = tuple[
    Projection | JoinedProjections, Projection | JoinedProjections, Projection | JoinedProjections
]
"""Queries, keys and values."""


class _UnreadableError(Exception):
    """The reason why an attention cannot be read."""


def read_attention(
    chain: ModuleChain, x: Tensor, expected: Tensor, context: Mapping[str, Any]
) -> AttentionReading | RowsReading | str:
    """The reading of an attention whose output at the states x is `expected`: of its rows alone if
    its matrices cannot be read, and the reason if there are no rows either.

    Call it where the library returns rows, with the context for that mode. The model must be in
    eval mode, and `find_output_projection` must have run.
    """
    try:
        return _read(chain, x, expected, dict(context))
    except _UnreadableError as reason:
        return str(reason)
    except FOREIGN_ERRORS as error:
        return f"it does not run in the mode that returns its rows ({named_error(error)})"


def _read(
    chain: ModuleChain, x: Tensor, expected: Tensor, context: dict[str, Any]
) -> AttentionReading | RowsReading:
    first = chain.stages[0]
    close = tolerance(x.dtype)
    with watched(chain.linear_maps()) as seen, seeing_rows(first) as last_rows:
        output = chain(x, **context)
    rows = last_rows()
    name = _name(first)
    if last_rows.are_of_another_sequence:
        alone = _rows_alone(chain, x, context, output, last_rows, CROSSING)
        if alone is not None:
            return alone
        raise _UnreadableError(CROSSING)
    if rows is None:
        reason = last_rows.why_of_groups(rows) or f"{name} {NO_ROWS}"
        alone = _rows_alone(chain, x, context, output, last_rows, reason)
        if alone is not None:
            return alone
        raise _UnreadableError(reason)
    rows = rows.to(x.dtype)  # some softmax return float32
    if not difference(output, expected) <= close:
        raise _UnreadableError(f"{name} computes something else in the mode that returns its rows")
    try:
        of_groups = last_rows.why_of_groups(rows)
        if of_groups:
            raise _UnreadableError(_called_again(seen) or of_groups)
        reading = _with_matrices(chain, x, context, seen, rows)
    except _UnreadableError as error:
        changed_by = getattr(first, "changed_by", "")
        reason = str(error)
        if changed_by:
            reason = (
                f"the rows of its softmax are changed before they average values ({changed_by}),"
                " so that they are not read"
            )
        alone = _rows_alone(chain, x, context, output, last_rows, reason)
        if alone is not None:
            return alone
        raise _UnreadableError(reason) from None
    if not reading.whole_rows and _rows_alone(chain, x, context, output, last_rows, ""):
        return replace(reading, rows_alone=True)
    return reading


def _rows_alone(
    chain: ModuleChain,
    x: Tensor,
    context: dict[str, Any],
    output: Tensor,
    last_rows: LastRows,
    reason: str,
) -> RowsReading | None:
    """The reading of the rows alone, if they are all rows with which the map averages, and reach
    its output. What else mixes tokens in it, such as a convolution, is not looked for. `reason`
    says why the matrices are not read.
    """
    if not getattr(chain.stages[0], "averages_with_rows", True):
        return None
    others, is_changed = with_other_tokens(x)
    with seeing_rows(chain.stages[0]) as other_rows:
        changed_output = chain(others, **context)
    ways: list[See] = [
        LastRows.all_that_average,
        LastRows.heads_first,
        LastRows.by_sequence,
        LastRows.of_another_sequence,
        # others, as of an encoder in the same operations, do not depend on the state
        partial(LastRows.numbered, numbers=last_rows.that_differ(other_rows)),
        *(partial(LastRows.turned, heads_first=first) for first in (False, True)),
    ]
    for see in ways:
        rows, changed = see(last_rows), see(other_rows)
        if rows is None or changed is None or rows.shape != changed.shape:
            continue
        if len(rows) != len(x) or rows.shape[-2] != x.shape[1] or not sum_to_one(rows):
            continue
        test = RowsAndOutputs(x, is_changed, rows, changed, output, changed_output)
        if test.weigh_tokens():
            if see is LastRows.heads_first:
                reason = "its rows count heads before sequences"
            elif see is LastRows.by_sequence:
                reason = "it averages in a loop over sequences"
            elif isinstance(see, partial) and see.func is LastRows.turned:
                reason = "its rows have their axes in an unusual order"
            return RowsReading(rows.shape[1], f"rows alone are known: {reason}", see)
        if test.weigh_others():
            if not last_rows.are_of_groups:
                reason = CROSSING
            return RowsReading(rows.shape[1], f"rows alone are known: {reason}", see)
    return None


def _with_matrices(
    chain: ModuleChain,
    x: Tensor,
    context: dict[str, Any],
    seen: Sequence[RecordedCall],
    rows: Tensor,
) -> AttentionReading:
    """The reading with the matrices of each head."""
    first = chain.stages[0]
    close = tolerance(x.dtype)
    if chain.output_path is None:
        raise _UnreadableError(f"{_name(first)} {chain.ending}")
    *inner, last = seen
    heads = rows.shape[1]
    features = last.x.shape[-1]
    head = features // heads
    if features % heads:
        raise _UnreadableError(f"its {features} features do not divide into {heads} equal heads")
    candidates = list(_candidates(inner, x, heads, head))
    fitting = [
        candidate
        for candidate in candidates
        if difference(_averages(chain, candidate[2], x, rows, head), last.x) <= close
    ]
    if not fitting:
        why = _no_values(inner, x, heads, norms=named_norms(chain), has_candidates=bool(candidates))
        raise _UnreadableError(why)
    cap = _soft_cap(first)
    scores = Scores(chain, x, at_one_position(context), rows > 0, head, cap)
    (query, key, value), scale = _with_scale(fitting, scores)
    row_sums = rows.sum(-1)
    sums_to_one = sum_to_one(rows)
    over_queries = not sums_to_one and bool(((rows.sum(-2) - 1).abs() <= close).all())
    if over_queries:
        why_not = (
            "the weights of a column sum to 1, and not those of a row, so that the softmax runs"
            " over the queries: give it dim=-1"
        )
    else:
        sums_to_one = sums_to_one and not _other_parameters(first)
        missing = float((1 - row_sums).max())
        why_not = _why_not(chain, missing, scale, sums_to_one=sums_to_one)
    return AttentionReading(
        query=query,
        key=key,
        value=value,
        out=Projection(last.path, 0, last.y.shape[-1], scale_path=chain.scale_path),
        heads=heads,
        groups=value.rows // head,
        whole_rows=sums_to_one,
        scale=scale,
        key_offsets=ROTARY in context or cap is not None,
        position_scores=scale is not None and scores.has_position_scores(),
        why_not=why_not,
    )


def _name(first: nn.Module) -> str:
    """The class of the model's module; "it" for operations."""
    if hasattr(first, "label"):
        return "it"
    return type(first).__name__


def _soft_cap(attention: nn.Module) -> float | None:
    """The soft-cap of the scores that the module states."""
    for name in SOFT_CAPS:
        cap = getattr(attention, name, None)
        if isinstance(cap, (int, float)):
            return float(cap)
    return None


def _with_scale(candidates: Sequence[Candidate], scores: Scores) -> tuple[Candidate, float | None]:
    """The first candidate with bilinear scores, and their scale; if there is none, the first
    candidate, and None.
    """
    for candidate in candidates:
        query, key, _ = candidate
        scale = scores.scale(query, key)
        if scale is not None:
            return candidate, scale
    return candidates[0], None


def _no_values(
    inner: Sequence[RecordedCall], x: Tensor, heads: int, *, norms: str, has_candidates: bool
) -> str:
    """Why the linear maps before the last are not queries, keys and values. `norms` are among
    them.
    """
    again = _called_again(inner)
    if again:
        return again
    others = [part.x.dtype for part in inner if part.x.dtype != x.dtype]
    if others:
        return in_another_dtype(others[0], x.dtype)
    if has_candidates:
        operation = f"a norm ({norms})" if norms else "a gate"
        return (
            "its heads' averages are not averages of values that are linear in its input, or"
            f" another operation, such as {operation}, follows them"
        )
    for part in inner:
        is_regrouped = part.x.dim() == x.dim() and part.x.shape[0] != x.shape[0]
        if is_regrouped and torch.equal(part.x.reshape(-1), x.reshape(-1)):
            return (
                f"its linear maps read the states {tuple(x.shape)} as {tuple(part.x.shape)}: a"
                " sequence is several groups of tokens, such as channels or windows, and matrices"
                " are not read there"
            )
    names = dict.fromkeys(
        part.path.rpartition(".")[2] for part in inner if not torch.equal(part.x, x)
    )
    if names:
        reason = (
            f"; not applied to the state: {', '.join(names)} (added or relative positions, or a map"
            " between)"
        )
    else:
        reason = ""
    maps = "linear map before the last is" if len(inner) == 1 else "linear maps before the last are"
    return f"its {len(inner)} {maps} not queries, keys and values of {heads} heads{reason}"


def in_another_dtype(dtype: torch.dtype, of_states: torch.dtype) -> str:
    """Why maps that compute in that dtype are not read."""
    names = [str(each).removeprefix("torch.") for each in (dtype, of_states)]
    return f"its linear maps compute in {names[0]} and its states are {names[1]}"


def _called_again(parts: Sequence[RecordedCall]) -> str:
    """The linear map that is called more than once, in words; "" if there is none."""
    for path, calls in Counter(part.path for part in parts).items():
        if calls > 1:
            return (
                f"its linear map {path.rpartition('.')[2]} is called {calls} times in a pass, as"
                " in a loop over tokens, or for relative positions too: matrices are not read there"
            )
    return ""


def _candidates(
    inner: Sequence[RecordedCall], x: Tensor, heads: int, head: int
) -> Iterator[Candidate]:
    """Queries, keys and values that fit the shapes. They are three linear maps in any order;
    queries and one map of keys and values; or one map of all three. A shared map holds them one
    below the other, or group by group of heads. Or each head has three maps of its own.
    """
    if not all(torch.equal(part.x, x) for part in inner):
        return
    maps = [Projection(part.path, 0, part.y.shape[-1]) for part in inner]
    if any(projection.rows % head for projection in maps):
        return
    if len(maps) == 1:
        groups, remainder = divmod(maps[0].rows // head - heads, 2)
        if remainder:
            return
        for sizes, parts in _layouts(heads, groups, head):
            query, key, value = maps[0].cut(sizes, parts)
            yield query, key, value
    elif len(maps) == 2:
        for query, keys_and_values in itertools.permutations(maps):
            groups, remainder = divmod(keys_and_values.rows // head, 2)
            if query.rows != heads * head or remainder:
                continue
            for sizes, parts in _layouts(heads, groups, head):
                first, second = keys_and_values.cut(sizes[1:], parts)
                yield query, first, second
                yield query, second, first
    elif len(maps) == 3:
        for query, key, value in itertools.permutations(maps):
            if query.rows == heads * head and key.rows == value.rows and query.rows % key.rows == 0:
                yield query, key, value
    elif len(maps) == 3 * heads and all(each.rows == head for each in maps):
        by_head = [maps[role::3] for role in range(3)]
        by_role = [maps[role * heads : (role + 1) * heads] for role in range(3)]
        for of_roles in (by_head, by_role):
            joined = [JoinedProjections(tuple(of_role)) for of_role in of_roles]
            yield from itertools.permutations(joined, 3)


def _layouts(heads: int, groups: int, head: int) -> Iterator[tuple[tuple[int, int, int], int]]:
    """How one map may hold queries, keys and values: their sizes, and the number of equal parts."""
    if groups > 0 and heads % groups == 0:
        for parts in dict.fromkeys((1, groups)):
            query_rows = heads * head // parts
            key_rows = groups * head // parts
            yield (query_rows, key_rows, key_rows), parts


def _averages(
    chain: ModuleChain, value: Projection | JoinedProjections, x: Tensor, rows: Tensor, head: int
) -> Tensor:
    """The heads' averages, concatenated: sum_j a_hij (V x_j + b_v)."""
    weight, bias = value.weight(chain).to(x.dtype), value.bias(chain)
    if bias is not None:
        bias = bias.to(x.dtype)
    values = by_head(F.linear(x, weight, bias), rows.shape[1], head)
    return (rows @ values).transpose(1, 2).flatten(-2)


def _other_parameters(chain: nn.Module) -> bool:
    """Whether it has weights, such as sinks, that are no part of a linear map, a norm or a table of
    positions.
    """
    recognised = {
        parameter
        for part in chain.modules()
        if isinstance(part, nn.Embedding) or is_linear(part) or as_norm(part) is not None
        for parameter in part.parameters()
    }
    return any(parameter not in recognised for parameter in chain.parameters())


def _why_not(chain: ModuleChain, missing: float, scale: float | None, *, sums_to_one: bool) -> str:
    """How the attention differs from an ordinary one, or ""."""
    if not sums_to_one and missing > tolerance(next(chain.parameters()).dtype):
        return f"a sink takes up to {missing:.2g} of a row, but theta needs rows that sum to 1"
    if not sums_to_one:
        return (
            "its scores may depend on weights beside its maps, such as a table of positions, a"
            " sink, or gains of queries and keys, so that its matrices alone do not give them"
        )
    if scale is not None:
        return ""
    norms = named_norms(chain)
    if norms:
        return f"norms act on its queries and keys ({norms})"
    return (
        "its scores are not a number times <Q x, K x>: positions may rotate queries and keys, or"
        " another function may act on the scores"
    )
