"""The language model: embeddings, a `Depth` of attention and FFN sublayers, a final norm if the
placement needs one, and a head.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import Scalar, StreamRows, TokenIds
from ctrans.dynamics.depth import check_matches
from ctrans.dynamics.norm import Norm, make_norm
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.scheme import trajectory
from ctrans.model.blocks import drawn_depth, make_depth
from ctrans.model.config import GPTConfig
from ctrans.model.size import check_buildable
from ctrans.model.unit_weights import put_on_spheres
from solvers import ConfigError, Solution, checked, is_dense, shown

TOKEN_TYPES = (torch.int64, torch.int32)


@checked
class GPT(nn.Module):
    """A decoder-only Transformer of any placement and dt: logits =
    head(N_final(depth(embed(tokens)))), with weights drawn from `seed`.

    `config.positions` sets the positional encoding. The head shares the token embedding's weights
    unless `config.tied` is False. `model.depth` is the `Depth`. With `on_demand`, the weights of
    each attention and FFN are drawn when they are used and dropped when the next map is used. They
    are the same weights, but need the memory of one sublayer only (see
    `ctrans.dynamics.weights.on_demand`).
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, on_demand: bool = False):
        super().__init__()
        check_buildable(config, seed, on_demand=on_demand)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding: nn.Embedding | None
        if config.places.embedding:
            self.position_embedding = nn.Embedding(config.context, config.width)
        else:
            self.position_embedding = None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for embedding in (self.token_embedding, self.position_embedding):
                if embedding is not None:
                    embedding.weight.normal_(0.0, config.embedding_std, generator=generator)
        if config.tied:
            self.unembedding = None
        else:
            self.unembedding = nn.Linear(config.width, config.vocab_size, bias=False)
        if on_demand:
            self.depth = drawn_depth(config, generator)
        else:
            self.depth = make_depth(config, generator)
        self.final_norm: Norm | nn.Identity
        if config.placements[-1].ffn.final_norm and not config.is_stack:
            self.final_norm = make_norm(config)
        else:
            self.final_norm = nn.Identity()
        self.logit_scale: nn.Parameter | None
        if RESIDUALS[config.residual].unit_weights:
            # nGPT's s_z: without it rows of length 1 give logits of at most 1, and the
            # cross-entropy stays near that of guessing
            self.logit_scale = nn.Parameter(torch.full((config.vocab_size,), config.width**-0.5))
        else:
            self.logit_scale = None
        if self.unembedding is not None:
            nn.init.normal_(self.unembedding.weight, 0.0, config.embedding_std, generator=generator)
        self._normalise_embeddings()

    def forward(
        self, tokens: TokenIds, targets: TokenIds | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Scalar | None]:
        """The logits of each next token; with `targets` also their mean cross-entropy in nats.
        Targets of -1 and -100 do not count.
        """
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        return logits, self.loss(logits, tokens, targets)

    def loss(self, logits: Tensor, tokens: Tensor, targets: Tensor) -> Scalar:
        """The mean cross-entropy in nats over all targets except -1. Raises ConfigError for no such
        target and for unknown tokens.
        """
        if not is_dense(logits) or not is_dense(tokens):
            raise ConfigError(
                f"logits = {shown(logits)} and tokens = {shown(tokens)}: give two dense tensors"
            )
        if not is_dense(targets) or targets.dtype != torch.int64:
            if is_dense(targets):
                targets_are = f"of {targets.dtype}"
            else:
                targets_are = shown(targets)
            raise ConfigError(
                f"the targets are {targets_are}: give a tensor of int64 with the tokens' shape"
            )
        if targets.shape != tokens.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}: give"
                " one target per token"
            )
        if logits.shape[:-1] != targets.shape:
            raise ConfigError(
                f"logits = {shown(logits)} for targets of shape {tuple(targets.shape)}: give one"
                " row per target"
            )
        self._check_device("targets", targets)
        targets = counted(targets)
        self._check_range("targets", targets.where(targets != -1, 0))
        return next_token_loss(logits, targets)

    def embed(self, tokens: TokenIds) -> StreamRows:
        """X_0: token embeddings plus learned position embeddings if there are any, once for each
        stream.

        Raises ConfigError for sequences longer than the context and for unknown tokens.
        """
        if not is_dense(tokens) or tokens.dtype not in TOKEN_TYPES or tokens.dim() == 0:
            if is_dense(tokens):
                tokens_are = f"{tuple(tokens.shape)} of {tokens.dtype}"
            else:
                tokens_are = shown(tokens)
            raise ConfigError(
                f"the tokens are {tokens_are}: give a tensor of int64 or int32 of shape (*batch,"
                " tokens)"
            )
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ConfigError(
                f"{length} tokens exceed the context of {self.config.context}: shorten the text or"
                " raise context"
            )
        self._check_device("tokens", tokens)
        self._check_range("tokens", tokens)
        x0: Tensor = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x0 = x0 + self.position_embedding(torch.arange(length, device=tokens.device))
        streams = self.config.state_streams
        if streams == 1:
            return x0
        return torch.cat([x0] * streams, -1)

    def head(self, x: StreamRows) -> Float[Tensor, "*batch tokens vocab"]:
        """Logits of the final hidden state; with several streams, of their mean."""
        streams = self.config.state_streams
        state_width = self.config.width * streams
        if not is_dense(x) or x.shape[-1:] != (state_width,):
            raise ConfigError(f"x = {shown(x)}: give states of width {state_width}")
        check_matches("x", x, [self.head_weight()])
        if streams > 1:
            x = x.unflatten(-1, (streams, self.config.width)).mean(-2)
        return F.linear(self.final_norm(x), self.head_weight())

    def head_weight(self) -> Float[Tensor, "vocab width"]:
        """W of the logits W N_final(x): the embedding's or the head's own. With weights on spheres
        it is diag(s) W, s = sqrt(d) z with a trained z for each token that starts at 1/sqrt(d). So
        s moves at sqrt(d) times the learning rate (nGPT, arXiv 2410.01131, section 2.1).
        """
        weight: Tensor
        if self.unembedding is None:
            weight = self.token_embedding.weight
        else:
            weight = self.unembedding.weight
        if self.config.rules.logits:
            weight = weight * self.config.times_wider**self.config.rules.logits
        if self.logit_scale is not None:
            weight = self.logit_scale[:, None] * self.config.width**0.5 * weight
        return weight

    def trajectory(self, tokens: TokenIds, **options: Any) -> Solution:
        """X at depth-time 0 and at the end of each segment, from X_0 = embed(tokens). Options and
        errors are those of `ctrans.dynamics.scheme.trajectory`.
        """
        return trajectory(self.depth, self.embed(tokens), **options)

    def at_depth(self, blocks: int, weights: str = "linear") -> GPT:
        """A copy of this model with another number of blocks over the same depth-time T (for a
        stack, another number of steps).

        See `Depth.resample` for its weights. Raises ConfigError for a number of blocks below 1 and
        an unknown interpolation.
        """
        config = self.config.at_depth(blocks)
        depth = self.depth.resample(blocks, weights)
        model = copy.deepcopy(self, {id(self.depth): depth})
        model.config = config
        return model

    def after_step(self) -> None:
        """Call this after each optimiser step. With the residual of nGPT it puts the weights back
        on their spheres; otherwise it does nothing.
        """
        if RESIDUALS[self.config.residual].unit_weights:
            put_on_spheres(self.depth.sublayers)
        self._normalise_embeddings()

    def _normalise_embeddings(self) -> None:
        if RESIDUALS[self.config.residual].unit_weights:
            maybe = (self.token_embedding, self.position_embedding, self.unembedding)
            embeddings = [embedding for embedding in maybe if embedding is not None]
            put_on_spheres([], embeddings)

    def _check_device(self, what: str, ids: Tensor) -> None:
        device = self.token_embedding.weight.device
        if ids.device != device:
            raise ConfigError(
                f"the {what} are on {ids.device} and the model is on {device}: move one to the"
                " other"
            )

    def _check_range(self, what: str, ids: Tensor) -> None:
        check_range(what, ids, self.config.vocab_size)


def check_range(what: str, ids: Tensor, vocabulary: int) -> None:
    """Raises ConfigError for ids outside of the vocabulary."""
    # on an accelerator the check would wait for the device, and in a compiled graph end it; there
    # the embedding raises
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise ConfigError(
            f"{what} run from {lowest} to {highest}, the vocabulary from 0 to {vocabulary - 1}:"
            " give ids of this model's vocabulary"
        )


def counted(targets: Tensor) -> Tensor:
    """The targets with -1 in place of -100, torch's own number of those that do not count."""
    return torch.where(targets == -100, -1, targets)


def next_token_loss(logits: Tensor, targets: Tensor) -> Scalar:
    """The mean cross-entropy in nats over all targets except -1 and -100. Raises ConfigError if
    there is none, for targets that are no int64, and for another number of rows of logits.
    """
    if targets.dtype != torch.int64:
        raise ConfigError(f"the targets are of {targets.dtype}: give a tensor of int64")
    targets = counted(targets)
    if targets.device.type == "cpu" and not (targets != -1).any():
        raise ConfigError(
            f"all {targets.numel()} targets are -1 or -100, so there is no loss: give at least one"
            " token to predict, or no targets"
        )
    if logits.shape[:-1].numel() != targets.numel():
        raise ConfigError(
            f"the head gives {tuple(logits.shape)} for targets {tuple(targets.shape)}: take a model"
            " with logits of every token"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)
