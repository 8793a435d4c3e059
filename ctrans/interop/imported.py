"""A foreign model as `control` and `stability` read it: X_0 = embed(tokens), a `Depth`, logits =
head(X_T).

Nothing is copied. The fields of the depth are the model's own modules. What surrounds the blocks
(embeddings, final norm, pooler, head) is the model itself, run with blocks that return their state
unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.base.printable import one_line
from ctrans.base.shapes import TokenIds, TokenRows
from ctrans.control.shown_factors import Factors
from ctrans.dynamics.depth import Depth, check_dt
from ctrans.dynamics.fields import Kind, ParallelMaps
from ctrans.dynamics.scheme import trajectory
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.attention_in_model import attention_in_model
from ctrans.interop.attention_reading import AttentionReading, RowsReading, read_attention
from ctrans.interop.attention_rows import showing_rows
from ctrans.interop.block_structure import Structure, depth_of, make_of
from ctrans.interop.factors import factors_of
from ctrans.interop.ffn_in_model import FeedForwardReading, ffn_in_model, read_ffn
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.found_architecture import architecture_of
from ctrans.interop.model_adapter import OUTPUTS, REMEMBERED, ModelAdapter
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm
from ctrans.interop.probe_weights import random_states, versions_of
from ctrans.interop.returned_loss import why_other_loss
from ctrans.interop.tolerances import difference, same_where_finite
from ctrans.interop.transformers_adapter import TransformersAdapter
from ctrans.interop.transformers_stream import TransformersStream
from ctrans.model.gpt import check_range, next_token_loss
from solvers import ConfigError, Solution


class Imported(nn.Module):
    """X_0 = embed(tokens), dX/dt = v_k(X) by the model's own sublayers, logits = head(X_T). For an
    image model, tokens are pixels.

    `config` says what was recognised. Raises ConfigError, listing what was found, if the structure
    is not recognised.
    """

    model: Any  # a module of the library, whose methods nn.Module does not know
    assumes_hidden_tokens: bool = False
    """As `Opened` has it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        dt: float = 1.0,
        anatomy: Anatomy | None = None,
        adapter: ModelAdapter | None = None,
    ):
        super().__init__()
        self.model = model
        if adapter is None:
            self._read_transformers(dt, anatomy or Anatomy())
        else:
            self._read(adapter, dt)

    def _read_transformers(self, dt: float, anatomy: Anatomy) -> None:
        """Reads a model of `transformers`: by the usual names of its blocks and their parts, and
        from its operations where it has others.
        """
        try:
            self._read(TransformersAdapter(self.model, anatomy), dt)
            return
        except FOREIGN_ERRORS as by_name:
            if has_weights_on_demand(self.model):
                raise
            try:
                adapter = TransformersStream(self.model, anatomy)
                adapter.because = f"; its blocks are not read: {one_line(by_name)}"
                self._read(adapter, dt)
            except ConfigError as error:
                if not isinstance(by_name, ConfigError):
                    raise by_name from None  # it does not run
                if str(error) == str(by_name):
                    raise
                raise ConfigError(f"{by_name}; nor is it read by its sums: {error}") from by_name

    def _read(self, adapter: ModelAdapter, dt: float) -> None:
        """Reads the parts of its depth."""
        model = self.model
        self.adapter = adapter
        adapter.is_opening = True
        try:
            with as_found(model), torch.no_grad():
                structures, like = adapter.structures()
                _expose_maps(
                    adapter, structures, like, every_block=not has_weights_on_demand(model)
                )
                adapter.check(depth_of(structures, 1.0))
        finally:
            adapter.is_opening = False
        self.depth = depth_of(structures, check_dt(dt))
        for part in self.depth.modules():
            if isinstance(part, AdaptedNorm):
                part.to_dtype(like.dtype)
        self.config = architecture_of(self.adapter, structures, like.shape[-1], self.depth)
        self._parts = _parts_of(self.depth)
        self._lengths = self.depth.lengths
        # inputs, and versions of the weights, with which the module computed as its parts
        self._checked: list[tuple[Tensor, tuple[int, ...]]] = []

    def factors(self, states: Sequence[Tensor]) -> Factors:
        """Whether its blocks compute with their matrices what was read, at any size of them, and at
        these states before each segment.
        """
        return factors_of(self.adapter, list(self.depth.sublayers), self.depth.lengths, states)

    def own_pass(self, tokens: Tensor, targets: Any) -> tuple[Tensor | None, Tensor | None]:
        """The logits of a forward pass of the model itself; None inside of `padded`, and where the
        user gave its embed or head.
        """
        replaced = getattr(self.adapter, "own_embed", None) or getattr(
            self.adapter, "own_head", None
        )
        if replaced is not None or self.adapter.padding is not None:
            return None, None
        return self.adapter.tensor(self.adapter.run(tokens)), None

    def why_other_loss(self) -> str:
        """Why the loss that the model returns is not the cross-entropy; "" if it may be."""
        return why_other_loss(self.adapter)

    def forget(self) -> None:
        """Drops the cached masks and other arguments of the blocks; call it after the weights
        change.
        """
        self.adapter.forget()

    def forward(
        self, tokens: Tensor, targets: TokenIds | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits, and with `targets` their mean cross-entropy in nats, without targets of -1.
        Raises ConfigError if all targets are -1.
        """
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        return logits, next_token_loss(logits, targets)

    def embed(self, tokens: Tensor) -> TokenRows:
        """X_0: the input of the model's first block for tokens (*batch, tokens), or images (batch,
        channels, height, width).

        Raises ConfigError for token ids outside the vocabulary and for sequences longer than the
        model's context.
        """
        if not isinstance(tokens, Tensor):
            raise ConfigError(
                f"the inputs are a {type(tokens).__name__}: give the tensor that is the first"
                " argument in example=, without the others"
            )
        if self.vocabulary:
            self._check_tokens(tokens)
        x = self.adapter.embed(tokens)
        if not self.adapter.knows_its_inputs and self._is_as_opened():
            self._check_inputs(tokens, x)
        return x

    def _is_as_opened(self) -> bool:
        """Whether nobody has given it other parts or lengths."""
        parts = _parts_of(self.depth)
        same = (one is other for one, other in zip(parts, self._parts, strict=False))
        return len(parts) == len(self._parts) and all(same) and self.depth.lengths == self._lengths

    def _check_inputs(self, tokens: Tensor, x: TokenRows) -> None:
        """Raises ConfigError if the module computes for these inputs otherwise than its parts, as
        they were read on the example.
        """
        versions = versions_of(self.adapter.model)
        is_checked = any(
            same == versions and torch.equal(tokens, checked) for checked, same in self._checked
        )
        if is_checked:
            return
        axes = len(x.shape) - 2
        with torch.no_grad():
            rows = tokens.reshape(-1, *tokens.shape[axes:])
            expected = self.adapter.tensor(self.adapter.run(rows))
            computed = self.adapter.tensor(self.outputs(self.depth(x.detach())))
        if expected is None or computed is None:
            return
        if not same_where_finite(computed, expected):
            raise ConfigError(
                f"{self.config.model} computes for these inputs otherwise than for its example"
                f" (relative difference {difference(computed, expected):.1g}), as with a number"
                " that depends on their length, a padding mask, or weights that have changed since"
                " it was opened: open it again, with these inputs as example="
            )
        self._checked = [*self._checked[1 - REMEMBERED :], (tokens.detach().clone(), versions)]

    def head(self, x: TokenRows) -> Tensor:
        """The model's output for the last block's output: logits, or the last hidden state of a
        model without a head.

        Raises ConfigError if the output has neither, listing its entries.
        """
        output = self.outputs(x)
        result = self.adapter.tensor(output)
        if result is None:
            if isinstance(output, Mapping):
                names = ", ".join(output)
            else:
                names = type(output).__name__
            raise ConfigError(
                f"{self.config.model} returns {names}, not one of {', '.join(OUTPUTS)}: give a"
                " module whose forward returns the one that you want; `trajectory` has the states"
            )
        if not result.dim():
            raise ConfigError(
                f"{self.config.model} returns one number, such as its loss, and no output for each"
                " sequence: let its forward return the logits, and give the loss as loss=, or read"
                " outputs(x)"
            )
        if len(result) != x.shape[:-2].numel():
            raise ConfigError(
                f"the output {tuple(result.shape)} of {self.config.model} is not for"
                f" {x.shape[:-2].numel()} sequences: return them along its first axis, or read"
                " outputs(x)"
            )
        return result.reshape(*x.shape[:-2], *result.shape[1:])

    def outputs(self, x: TokenRows) -> Any:
        """All that the model returns for the last block's output x, with the leading axes flattened
        into one.
        """
        return self.adapter.outputs(x.reshape(-1, *x.shape[-2:]))

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution:
        """X at depth-time 0 and at the end of each segment, from X_0 = embed(tokens). Takes the
        options of `ctrans.dynamics.scheme.trajectory`. Euler with one step is the model itself.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    @contextlib.contextmanager
    def padded(self, mask: Tensor) -> Iterator[None]:
        """Inside, tokens where the mask (batch, tokens) is 0 are padding, as in the library's
        `attention_mask`. Positions, learned and rotary ones, count the text alone, of decoders as
        in `generate`, and of encoders too: a masked token inside a text is skipped. The library's
        forward with `attention_mask` alone counts padding before and inside the text too.

        All maps and instruments then read only these sequences: no token reads padding, and means
        over tokens leave padding out (`Instrument.kept`). Set targets to -1 there. Raises
        ConfigError for a model that is not of `transformers`, and for an invalid mask.
        """
        if not self.adapter.takes_padding or not self.vocabulary:
            raise ConfigError(
                f"{self.config.model} takes no padding mask here: pass it in example=, with the"
                " other arguments of its forward. Open a language model of transformers with"
                " from_transformers"
            )
        if mask.dim() != 2 or not ((mask == 0) | (mask == 1)).all() or not mask.any(1).all():
            raise ConfigError(
                "a padding mask is (batch, tokens), 1 for tokens and 0 for padding, with at least"
                " one token in each row"
            )
        before = self.adapter.padding
        self.adapter.padding = mask.long().clone()  # the caller may fill the mask anew
        try:
            yield
        finally:
            self.adapter.padding = before

    @property
    def kept(self) -> Bool[Tensor, "batch tokens"] | None:
        """Where `padded` says that there is text; outside of it, where the padding mask of the
        example does. None if there is no padding.
        """
        mask = self.adapter.padding
        if mask is None:
            return self.adapter.text
        return mask.bool()

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model embeds; 0 if it reads other inputs."""
        return self.adapter.vocabulary

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() == 0:
            raise ConfigError(
                f"the tokens are {tuple(tokens.shape)} of {tokens.dtype}: give int64 or int32"
                " (*batch, tokens)"
            )
        longest = self.config.context
        if longest is not None and tokens.shape[-1] > longest:
            raise ConfigError(
                f"{tokens.shape[-1]} tokens exceed the model's context of {longest}: shorten the"
                " text"
            )
        check_range("tokens", tokens, self.vocabulary)


def _parts_of(depth: Depth) -> list[nn.Module]:
    """The sublayers and their maps."""
    return [part for sublayer in depth.sublayers for part in (sublayer, sublayer.field)]


def _expose_maps(
    adapter: ModelAdapter, structures: list[Structure], like: Tensor, *, every_block: bool
) -> None:
    """Replaces the blocks' modules by maps that expose their matrices and bounds. With
    `every_block` each block is read; otherwise one block of each build is read.
    """
    readings: dict[object, list[SublayerReadings]] = {}
    if len(like) == 1:  # with two sequences the order of axes shows
        like = torch.cat([like, like])
    if len(like) == like.shape[-2]:  # as many sequences as tokens hide it
        like = torch.cat([like, like[:1]])
    x = random_states(like)
    for i, (block, structure) in enumerate(zip(adapter.blocks(), structures, strict=True)):
        key: object
        if every_block:
            key = i
        else:
            key = make_of(block)
        if key not in readings:
            # the last one first: if weights are read on demand, the FFN's are still in memory
            of_last_first = [_read(adapter, i, each, x) for each in reversed(structure.sublayers)]
            readings[key] = of_last_first[::-1]
        for sublayer, of_sublayer in zip(structure.sublayers, readings[key], strict=True):
            _expose(adapter, i, sublayer, of_sublayer)


SublayerReadings = Mapping[Kind, AttentionReading | RowsReading | FeedForwardReading | str]
"""What was read of the maps of a sublayer, by kind."""


def _expose(
    adapter: ModelAdapter, block: int, sublayer: Sublayer, readings: SublayerReadings
) -> None:
    """Gives the sublayer a map that exposes what was read of it."""
    maps: dict[Kind, nn.Module] = {}
    for kind, branch in sublayer.branches.items():
        reading = readings.get(kind)
        if kind == "ffn" and isinstance(reading, (FeedForwardReading, str)):
            maps[kind] = ffn_in_model(branch.field, reading)
        elif not isinstance(reading, (FeedForwardReading, type(None))):
            maps[kind] = attention_in_model(branch.field, block, adapter, reading)
    if isinstance(sublayer.field, ParallelMaps):
        gains = (sublayer.field.attention_gains, sublayer.field.ffn_gains)
        sublayer.field = ParallelMaps(maps["attention"], maps["ffn"], gains)
    elif maps:
        sublayer.field = maps[sublayer.kind]


def _read(adapter: ModelAdapter, block: int, sublayer: Sublayer, x: Tensor) -> SublayerReadings:
    """The readings of the maps of a sublayer of that block, by kind."""
    chains = {
        kind: branch.field
        for kind, branch in sublayer.branches.items()
        if isinstance(branch.field, ModuleChain)
    }
    readings: dict[Kind, AttentionReading | RowsReading | FeedForwardReading | str] = {}
    if "ffn" in chains:
        readings["ffn"] = read_ffn(chains["ffn"], x)
    if "attention" in chains:
        attention = chains["attention"]
        output = attention(x, **adapter.block_context(block, x))
        with showing_rows(adapter.model):
            context = adapter.block_context(block, x)
            readings["attention"] = read_attention(attention, x, output, context)
    return readings
