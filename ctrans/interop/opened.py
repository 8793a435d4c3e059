"""An opened model of any origin: its depth, its loss, and how it reads text."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ctrans.interop.block_run import mixes_tokens
from ctrans.interop.directory_tokeniser import find_tokeniser
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.imported import Imported
from ctrans.interop.loss_names import LOSS_NAMES, Loss
from ctrans.interop.losses import AnyModel, ModelAround, ModelWithLoss, with_loss
from ctrans.interop.probe_weights import probe_weights, random_states
from ctrans.interop.tokens import Tokeniser
from ctrans.measure.walk import own_loss
from solvers import ConfigError, shown

HIDDEN_EVERY = 7
"""One token in so many is hidden from a masked language model, at fixed places: about the 15% of
BERT's training.
"""
BOTH_WAYS = {
    "mlm": "so its loss is that of hidden tokens",
    "next": "including those that it predicts",
}
"""By loss: the consequence for a model in which tokens read both ways."""
SHORTEST_WITH_PREFIX = 4
"""From so many tokens on, some may be a prefix for others."""
SEQUENCES = 2
"""For so many sequences a model's parts were read, so that what they read beside them is known."""
STAND_INS = ("mean", "random", "none")
"""Losses that a description names, because the model was not trained for them."""


class Opened(ModelAround):
    """A model opened for analysis. It computes in eval mode and without gradients of weights.

    It is a model itself: its `depth`, `embed`, `head` and `trajectory` are those of `model`. So is
    its loss, but where that is not known and the targets are classes: see `for_targets`.

    - `directory`: where it was read
    - `described`: what was recognised
    - `vocabulary`: the number of tokens that it embeds; 0 if it reads other inputs
    - `causal`: whether tokens read only earlier tokens, as its first attention of tokens among
      themselves computes, but for those of a prefix that read each other
    - `predicts`: whether its head gives logits of tokens
    - `loss`: a name in `LOSS_NAMES`, or "given"
    - `assumes_hidden_tokens`: whether its loss is that of hidden tokens only because its tokens
      read both ways: a user's module, without a named loss
    """

    model: AnyModel | ModelWithLoss
    assumes_hidden_tokens: bool = False
    called: str = "the loss"
    """How results call its loss."""

    def __init__(
        self,
        model: AnyModel,
        directory: Path | None,
        described: str,
        loss: str | Loss | None,
        vocabulary: int,
        *,
        causal: bool,
        predicts: bool,
    ):
        super().__init__()
        self.model, self.loss = with_loss(model, loss, predicts=predicts, causal=causal)
        if self.loss in STAND_INS:
            self.called = "a stand-in for the loss"
        if self.loss in STAND_INS or (not predicts and self.loss in LOSS_NAMES):
            described += f"; loss: {LOSS_NAMES[self.loss]}"
        self.directory = directory
        self.described = described
        self.vocabulary = vocabulary
        self.causal = causal
        self.predicts = predicts

    def forward(self, tokens: Tensor, targets: Any = None) -> tuple[Tensor, Tensor | None]:
        """The output of the head, and with `targets` the loss."""
        model, _ = self.for_targets(tokens, targets)
        output_and_loss: tuple[Tensor, Tensor | None] = model(tokens, targets)
        return output_and_loss

    def for_targets(self, tokens: Any, targets: Any) -> tuple[AnyModel | ModelWithLoss, str]:
        """The model inside, with the cross-entropy of these targets where its loss is not known and
        they are classes; and why a stand-in does not use them, or "".
        """
        from ctrans.interop.class_targets import with_class_targets  # it imports this module

        chosen, unused = with_class_targets(self, tokens, targets)
        return chosen.model, unused

    @property
    def reads(self) -> tuple[int, ...]:
        """The shape of one input, without the batch axis, as in the example by which it was
        opened.
        """
        return tuple(self._row.shape)

    @property
    def tokens_first(self) -> bool:
        """Whether the module itself reads (tokens, sequences), so that inputs are turned for it."""
        imported = self.imported
        return imported is not None and getattr(imported.adapter, "tokens_first", False)

    @property
    def _row(self) -> Tensor:
        """One input of that example."""
        imported = self.imported
        if imported is None:
            return torch.zeros(1, dtype=torch.int64)
        return imported.adapter.row

    @property
    def imported(self) -> Imported | None:
        """The foreign model, without the loss around it; None for a model of ctrans."""
        if isinstance(self.model, ModelWithLoss):
            model = self.model.model
        else:
            model = self.model
        if isinstance(model, Imported):
            return model
        return None

    @property
    def terminal_loss(self) -> Callable[[Tensor, Any], Tensor] | None:
        """L(X_T, targets) of `model`, unless it is the cross-entropy of the logits. Where the loss
        is not known it is a stand-in, also if the targets are classes. That of a model opened
        without a loss raises ConfigError.
        """
        return own_loss(self.model)

    def tokeniser(self) -> Tokeniser:
        """The tokenizer of its directory; bytes for a model without a directory. Errors as
        `find_tokeniser`.
        """
        return find_tokeniser(self.directory, self.vocabulary)

    def longest(self, limit: int) -> int:
        """The most tokens, at most `limit`, that it reads: what the model states, or what was
        found by trying.
        """
        context: int | None = self.config.context
        if context is not None:
            return min(limit, context)
        if not self.vocabulary or self._reads(limit):
            return limit
        lengths = range(2, limit)
        return 1 + bisect.bisect_left(lengths, 1, key=lambda length: int(not self._reads(length)))

    def _reads(self, length: int) -> bool:
        """Whether it runs on one sequence of so many tokens."""
        like = next(self.parameters(), torch.empty(0))
        row = self._row
        try:
            tokens = row[torch.arange(length) % len(row)]
            with torch.no_grad():
                self(tokens.unsqueeze(0).to(like.device))
        except FOREIGN_ERRORS:
            return False
        return True

    def pairs(
        self, windows: Int[Tensor, "batch longer"], mask: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their targets for its `loss`.

        - "next": the target is the next token
        - "mlm": every seventh token is hidden by `mask` and is the target there; targets are -1
          elsewhere. Without a mask each token is its own target, as for the chosen tokens that such
          a training leaves unchanged
        - "none": targets are -1 everywhere
        - stand-ins ignore targets; a given loss gets the targets of "next" if the model is causal
          and of "mlm" otherwise
        """
        if not isinstance(windows, Tensor) or windows.is_floating_point() or windows.dim() != 2:
            raise ConfigError(
                f"windows = {shown(windows)}: give ids (batch, tokens), of which targets are made;"
                " other inputs need targets of your own"
            )
        tokens = windows[:, :-1]
        next_tokens = windows[:, 1:]
        if self.loss != "given":
            kind = self.loss
        elif self.causal:
            kind = "next"
        else:
            kind = "mlm"
        if kind == "none":
            return tokens, torch.full_like(tokens, -1)
        if kind == "next":
            return tokens, next_tokens
        if kind != "mlm" or mask is None:
            return tokens, tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = (positions % HIDDEN_EVERY == 0).expand_as(tokens)
        return torch.where(hidden, mask, tokens), torch.where(hidden, tokens, -1)


def open_imported(
    model: Imported, directory: Path | None = None, loss: str | Loss | None = None
) -> Opened:
    """Opens an imported model as `open_model` opens a directory's. Its tokenizer is looked for in
    the directory.
    """
    like = model.adapter.like()
    like = like.expand(SEQUENCES, *like.shape)
    first = model.depth.sublayers[0]
    is_attention = first.kind in ("attention", "parallel")
    if is_attention and mixes_tokens(first.field, random_states(like)):
        mixing = [first]
    else:  # which part mixes tokens is unknown, or it is a later one; a cross-attention mixes none
        mixing = list(model.depth.sublayers)
    prefixes = [_prefix(sublayer.field, like) for sublayer in mixing]
    causal = None not in prefixes
    prefix = max((each or 0 for each in prefixes), default=0)
    predicts = model.adapter.predicts()
    model.forget()
    opened = Opened(
        model,
        directory,
        str(model.config),
        loss,
        model.vocabulary,
        causal=causal,
        predicts=predicts,
    )
    is_foreign_module = not type(model.model).__module__.startswith("transformers.")
    opened.assumes_hidden_tokens = (
        loss is None
        and bool(model.vocabulary)
        and opened.loss == "mlm"
        and directory is None
        and is_foreign_module
    )
    model.assumes_hidden_tokens = opened.assumes_hidden_tokens
    opened.described = "; ".join([opened.described, *_said_beside(opened, model, prefix)])
    return opened


def _said_beside(opened: Opened, model: Imported, prefix: int) -> Iterator[str]:
    """What is said of the model beside its parts: how it reads its tokens, and which count."""
    adapter = model.adapter
    if opened.tokens_first:
        yield (
            "the module reads (tokens, sequences), as without batch_first=True: its rows read each"
            " other. ctrans reads (sequences, tokens) and turns them for it, and targets for a loss"
            " of yours"
        )
    if adapter.text is not None:
        yield (
            f"a padding mask hides {int((~adapter.text).sum())} of {adapter.text.numel()} tokens of"
            " its example. Means and medians over tokens, and sensitivities, leave them out."
            " Distances, norms of attention, Lyapunov exponents, stretches, updates, transport and"
            " certificates count them: for these give a batch without padding"
        )
    if adapter.read_by_none:
        yield (
            f"no others read {adapter.read_by_none} of the tokens of its example, whatever the"
            " inputs, and all figures count them. If they are padding, give a mask for it"
        )
    elif adapter.like_padding:
        yield (
            f"{adapter.like_padding} tokens at the ends of the example's sequences repeat one id,"
            " no mask hides them, and no other token reads them: if they are padding, all figures"
            " still count them. Give a padding mask, or a batch without padding"
        )
    if adapter.apart:
        yield (
            f"a loss must not read outputs {sorted(adapter.apart)} (from 0), which are no functions"
            " of the last state alone"
        )
    if model.vocabulary and not opened.causal and opened.loss in BOTH_WAYS:
        yield (
            f"each token also reads later tokens, {BOTH_WAYS[opened.loss]}. If this is a GPT, its"
            " causal mask is missing"
        )
    if model.vocabulary and opened.causal and prefix:
        yield (
            f"its first {prefix} tokens read each other, and later ones only earlier tokens (a"
            " prefix): leave predictions of those first tokens out of a loss"
        )


def open_probed(
    module: nn.Module,
    imported: Callable[[], Imported],
    directory: Path | None,
    loss: str | Loss | None,
) -> Opened:
    """Opens what `imported` makes of the module, which has `probe_weights` meanwhile."""
    with probe_weights(module) as broken:
        opened = open_imported(imported(), directory, loss)
    if broken:
        opened.described += f"; not finite: the weight {broken[0]}"
        if len(broken) > 1:
            opened.described += f" and {len(broken) - 1} more"
    return opened


def _prefix(attention: nn.Module, like: Tensor) -> int | None:
    """How many tokens at the start read each other, if all later ones read only earlier tokens: 0
    if all tokens do so. None if tokens read later ones. States have the shape of `like` (sequences,
    tokens, width).
    """
    x = random_states(like)
    tokens = x.shape[-2]
    first = _read_by(attention, x, 0)
    if first is None:
        return None
    if not first[1:].any():
        return 0
    if tokens < SHORTEST_WITH_PREFIX:
        return None
    prefix = 1 + int(first.nonzero().max())

    def is_as_with_it(token: int) -> bool:
        read = _read_by(attention, x, token)
        if read is None:
            return False
        if token < prefix:
            return bool(read[:prefix].all()) and not bool(read[prefix:].any())
        # padding at the end does not read the padding before it
        return bool(read[token - 1]) and not bool(read[token + 1 :].any())

    if prefix < tokens - 1 and all(map(is_as_with_it, range(tokens - 1, -1, -1))):
        return prefix
    return None


def _read_by(attention: nn.Module, x: Tensor, token: int) -> Bool[Tensor, " tokens"] | None:
    """The tokens that a token of the first sequence reads: d|f(x)_i|^2/dx_j is not 0 exactly. None
    for a map without derivatives, which shows nothing.

    All are looked at, because a window may hide the last token in a model that reads both ways.
    """
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        size = attention(x)[0, token].square().sum()
        if not size.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(size, x)
    return gradient[0].ne(0).any(-1)
