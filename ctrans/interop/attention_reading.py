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

Rotary positions are set to the same position for all tokens, where rotations R cancel: <R q, R k> =
<q, k>. If they cancel for a position in the middle of the text, R is a rotation up to a factor,
which becomes part of the scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.interop.attention_rows import seeing_rows
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.module_chain import JoinedProjections, ModuleChain, Projection, is_linear
from ctrans.interop.norms import as_norm
from ctrans.interop.recorded_calls import RecordedCall, own_module, watched
from ctrans.interop.tolerances import difference, tolerance

ROTARY = "position_embeddings"
"""The argument that gives blocks cosines and sines, each (batch, tokens, head)."""
SCALES = ("scaling", "scale", "softmax_scale")
"""Attributes that hold the factor of the scores."""
NO_ROWS = "averages no tokens by rows that are known"
SOFT_CAPS = ("attn_logit_softcapping", "logit_softcapping")
"""Attributes that hold a soft-cap."""
FAINT = 0.3
"""A size of scores at which a soft-cap has no visible effect."""
STRONG = 3.0
"""A size of scores at which a soft-cap has an effect, and rows still have all their digits."""


@dataclass(frozen=True)
class AttentionReading:
    """Where Q, K, V and O are, with `heads` heads of which `heads // groups` share a key and a
    value.

    - `whole_rows`: whether rows sum to 1
    - `scale`: the factor of bilinear scores; None if scores are not bilinear
    - `key_offsets`: whether the offsets of keys can change the rows
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
    why_not: str


Candidate = tuple[
    Projection | JoinedProjections, Projection | JoinedProjections, Projection | JoinedProjections
]
"""Queries, keys and values."""


class _UnreadableError(Exception):
    """The reason why an attention cannot be read."""


def read_attention(
    chain: ModuleChain, x: Tensor, expected: Tensor, context: Mapping[str, Any]
) -> AttentionReading | str:
    """The reading of an attention whose output at the states x is `expected`; or the reason why
    there is none.

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
) -> AttentionReading:
    first = chain.stages[0]
    close = tolerance(x.dtype)
    with watched(chain.linear_maps()) as seen, seeing_rows(first) as last_rows:
        output = chain(x, **context)
    rows = last_rows()
    name = _name(first)
    if last_rows.are_of_another_sequence:
        raise _UnreadableError("its rows weigh the tokens of another sequence (cross-attention)")
    if rows is None:
        raise _UnreadableError(f"{name} {NO_ROWS}")
    if chain.output_path is None:
        raise _UnreadableError(f"{name} does not end in one linear map")
    if not difference(output, expected) <= close:
        raise _UnreadableError(f"{name} computes something else in the mode that returns its rows")
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
        raise _UnreadableError(_no_values(inner, x, heads, has_candidates=bool(candidates)))
    cap = _soft_cap(own_module(first))
    scores = _Scores(chain, x, _at_one_position(context), rows > 0, head, cap)
    (query, key, value), scale = _with_scale(fitting, scores)
    row_sums = rows.sum(-1)
    sums_to_one = bool(((row_sums - 1).abs() <= close).all())
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
        why_not=why_not,
    )


def _name(first: nn.Module) -> str:
    """The class of the model's module; "it" for operations."""
    if hasattr(first, "label"):
        return "it"
    return type(own_module(first)).__name__


def _soft_cap(attention: nn.Module) -> float | None:
    """The soft-cap of the scores that the module states."""
    for name in SOFT_CAPS:
        cap = getattr(attention, name, None)
        if isinstance(cap, (int, float)):
            return float(cap)
    return None


def _with_scale(candidates: Sequence[Candidate], scores: _Scores) -> tuple[Candidate, float | None]:
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
    inner: Sequence[RecordedCall], x: Tensor, heads: int, *, has_candidates: bool
) -> str:
    """Why the linear maps before the last are not queries, keys and values."""
    if has_candidates:
        return "its heads' averages are not averages of values that are linear in its input"
    names = dict.fromkeys(
        part.path.rpartition(".")[2] for part in inner if not torch.equal(part.x, x)
    )
    if names:
        reason = (
            f"; not applied to the state: {', '.join(names)} (relative positions, or a map between)"
        )
    else:
        reason = ""
    return (
        f"its {len(inner)} linear maps before the last are not queries, keys and values of {heads}"
        f" heads{reason}"
    )


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


def _by_head(z: Tensor, heads: int, head: int) -> Tensor:
    """(batch, tokens, groups * head) as (batch, heads, tokens, head), with each group repeated for
    the heads that share it.
    """
    parts: Tensor = z.unflatten(-1, (-1, head)).transpose(1, 2)
    return parts.repeat_interleave(heads // parts.shape[1], dim=1)


def _averages(
    chain: ModuleChain, value: Projection | JoinedProjections, x: Tensor, rows: Tensor, head: int
) -> Tensor:
    """The heads' averages, concatenated: sum_j a_hij (V x_j + b_v)."""
    values = _by_head(F.linear(x, value.weight(chain), value.bias(chain)), rows.shape[1], head)
    return (rows @ values).transpose(1, 2).flatten(-2)


@dataclass(frozen=True)
class _Scores:
    """The scores of an attention, known from the logarithms of its rows up to a constant for each
    row.
    """

    chain: ModuleChain
    x: Tensor
    context: dict[str, Any]
    visible: Tensor
    head: int
    cap: float | None
    maps: dict[Projection | JoinedProjections, Tensor] = field(default_factory=dict)
    """What has been computed of x, by its projection."""

    def scale(
        self, query: Projection | JoinedProjections, key: Projection | JoinedProjections
    ) -> float | None:
        """The factor of <Q x_i + b_q, K x_j + b_k> in the scores, or None if scores are something
        else.

        It is fitted at states so small that a cap has no effect, and must reproduce the rows at
        larger states. A factor that the module states is used if it fits. Otherwise the fit is
        rounded up, so that bounds remain valid.
        """
        small = self._state_size(query, key, FAINT * math.sqrt(self.head))
        large = self._state_size(query, key, STRONG * math.sqrt(self.head))
        if not 0 < small < large < math.inf:
            return None
        close = tolerance(self.x.dtype)
        faint = self._centred(self._products(query, key, small))
        by_position = self._observed(0.0)
        products_by_rows = (faint * (self._observed(small) - by_position)).sum()
        fitted = float(products_by_rows / faint.square().sum())
        agreeing = [stated for stated in self._stated() if abs(stated - fitted) <= close * stated]
        if agreeing:
            scale = max(agreeing)
        else:
            scale = fitted * (1 + close)
        scores = scale * self._products(query, key, large)
        if self.cap is None:
            capped = scores
        else:
            capped = self.cap * torch.tanh(scores / self.cap)
        if not scale > 0:
            return None
        miss = difference(self._centred(capped), self._observed(large) - by_position)
        if miss <= 2 * close:
            return scale
        return None

    def _stated(self) -> list[float]:
        """Candidates for the scale: what the module states and 1/sqrt(head), each also times the
        squared length of the rotary tables.
        """
        attributes = [getattr(own_module(self.chain.stages[0]), name, None) for name in SCALES]
        factors = [
            float(attribute)
            for attribute in attributes
            if isinstance(attribute, (int, float)) and not isinstance(attribute, bool)
        ]
        factors.append(self.head**-0.5)
        stretches = {1.0}
        if isinstance(self.context.get(ROTARY), tuple):
            cosines, sines = self.context[ROTARY]
            length = float((cosines.double().square() + sines.double().square()).max())
            if not abs(length - 1) <= tolerance(cosines.dtype):
                stretches.add(length)
        return [factor * stretch for factor in factors for stretch in stretches]

    def _state_size(
        self,
        query: Projection | JoinedProjections,
        key: Projection | JoinedProjections,
        target: float,
    ) -> float:
        """t for which the products of t x differ within rows by about `target`."""
        t = 1.0
        for _ in range(60):
            products = self._centred(self._products(query, key, t))
            size = float((products.square().sum() / self.visible.sum()).sqrt())
            following = t * math.sqrt(target / max(size, 1e-30))
            if following == t:
                break
            t = following
        return t

    def _products(
        self, query: Projection | JoinedProjections, key: Projection | JoinedProjections, t: float
    ) -> Tensor:
        """<Q t x_i + b_q, K t x_j + b_k> for each head."""
        q = self._projected(query, t)
        k = self._projected(key, t)
        return q @ k.transpose(-1, -2)

    def _projected(self, projection: Projection | JoinedProjections, t: float) -> Tensor:
        if projection not in self.maps:
            self.maps[projection] = F.linear(self.x, projection.weight(self.chain)).double()
        z = t * self.maps[projection]
        bias = projection.bias(self.chain)
        if bias is not None:
            z = z + bias.double()
        return _by_head(z, self.visible.shape[1], self.head)

    def _observed(self, t: float) -> Tensor:
        """The logarithms of the rows at t x, centred."""
        with seeing_rows(self.chain.stages[0]) as last_rows:
            self.chain(t * self.x, **self.context)
        rows = last_rows()
        assert rows is not None
        return self._centred(torch.where(self.visible, rows.double(), 1.0).log())

    def _centred(self, scores: Tensor) -> Tensor:
        """Scores minus their mean over the tokens that a row reads; 0 elsewhere."""
        visible_scores = torch.where(self.visible, scores, 0.0)
        mean = visible_scores.sum(-1, keepdim=True) / self.visible.sum(-1, keepdim=True)
        return torch.where(self.visible, scores - mean, 0.0)


def _at_one_position(context: dict[str, Any]) -> dict[str, Any]:
    """The context with the last token's rotary position for all tokens."""
    if ROTARY not in context:
        return context
    rotary = context[ROTARY]
    at_the_last: Tensor | tuple[Tensor, ...]
    if isinstance(rotary, Tensor):
        at_the_last = rotary[..., -1:, :].expand_as(rotary)
    else:
        at_the_last = tuple(table[..., -1:, :].expand_as(table) for table in rotary)
    return {**context, ROTARY: at_the_last}


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
            "it has weights of unknown effect (such as a sink, or a bias of its rows), but theta"
            " needs known rows"
        )
    if scale is not None:
        return ""
    norms = [
        path.rpartition(".")[2] for path, part in chain.named_modules() if as_norm(part) is not None
    ]
    if norms:
        return f"norms act on its queries and keys ({', '.join(norms)})"
    return (
        "its scores are not a number times <Q x, K x>: positions may rotate queries and keys, or"
        " another function may act on the scores"
    )
