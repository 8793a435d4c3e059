"""The OT-Transformer (Kan et al., arXiv:2501.18793): one stack of blocks is the velocity of an ODE,
with the same weights at all times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import Scalar, TokenIds, TokenRows
from ctrans.dynamics.depth import Depth, check_count, check_dt
from ctrans.dynamics.scheme import trajectory
from ctrans.interop.config_checks import MOST_PARTS
from ctrans.model.gpt import GPT
from ctrans.model.stack import stacked
from solvers import ConfigError, Solution


@dataclass(frozen=True)
class OTConfig:
    """The settings of an OT-Transformer: a stack of `depth` blocks with the placement `stack`, and
    `steps` steps of length `dt` over it.

    - `placement`: that of the velocity: "output" if a norm ends it, "none" otherwise
    - `kinetic`: lmbda, the weight of the kinetic cost in training
    - `initialisation`: None, because a checkpoint does not record how its weights were drawn
    """

    vocab_size: int
    context: int
    depth: int
    width: int
    heads: int
    stack: str
    placement: str
    norm: str
    steps: int
    dt: float
    bias: bool
    kinetic: float = 0.0
    causal: bool = True
    initialisation: None = None

    def __str__(self) -> str:
        return (
            f"OT-Transformer (nanoGPT): {self.steps} steps of dt = {self.dt:g} over one stack of"
            f" {self.depth} blocks of width {self.width}, {self.heads} heads, placement"
            f" {self.stack} in it and {self.placement} around it, {self.norm}, kinetic cost"
            f" {self.kinetic:g}"
        )


class OTTransformer(nn.Module):
    """X_{k+1} = X_k + dt N_f(stack(X_k)), `steps` times with the same weights; logits = W_e X_T
    without a norm.

    It is made from a GPT. The blocks become the stack, and the final norm (or none) ends the
    velocity. `dt` is 1/steps. It has what instruments need: `embed`, `depth`, `head`,
    `trajectory`, `config`.
    """

    def __init__(self, model: GPT, steps: int, *, kinetic: float = 0.0):
        super().__init__()
        check_count("steps", steps, MOST_PARTS)
        if isinstance(model.final_norm, nn.Identity):
            norm = None
        else:
            norm = model.final_norm
        model.final_norm = nn.Identity()
        c = model.config
        dt = 1.0 / steps
        self.model = model
        self.depth = stacked(model.depth, steps, dt, norm)
        self.config = OTConfig(
            vocab_size=c.vocab_size,
            context=c.context,
            depth=c.depth,
            width=c.width,
            heads=c.heads,
            stack=c.placement,
            placement=self.depth.sublayers[0].placement.name,
            norm=c.norm,
            steps=steps,
            dt=dt,
            bias=c.bias,
            kinetic=kinetic,
        )

    def with_scale(self, scale: float) -> OTTransformer:
        """The same weights with dt = scale/steps. Raises ConfigError unless `scale` is positive and
        finite.
        """
        dt = check_dt(check_dt(scale) * (1.0 / self.config.steps))
        self.depth = Depth(self.depth.sublayers, dt, per_block=1, shared=True)
        self.config = replace(self.config, dt=self.depth.dt)
        return self

    def native(self) -> GPT:
        """The same model as a GPT with `stack_steps`, which can be trained and saved. It shares the
        weights.

        Raises ConfigError if no norm ends the velocity (lnf_on = False) although its blocks have
        norms: no such GPT exists.
        """
        c = self.config
        config = replace(self.model.config, stack_steps=c.steps, dt=c.dt)
        has_norm = self.depth.sublayers[0].output_norm is not None
        if config.placements[-1].ffn.final_norm != has_norm:
            raise ConfigError(
                "no norm ends the velocity (lnf_on = False), but a GPT's stack of these blocks has"
                " one: use the OTTransformer"
            )
        model = GPT(config)
        model.token_embedding = self.model.token_embedding
        model.position_embedding = self.model.position_embedding
        model.depth = self.depth
        return model

    def forward(
        self, tokens: TokenIds, targets: TokenIds | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Scalar | None]:
        """The logits, and with `targets` their mean cross-entropy in nats. Errors as
        `GPT.forward`.
        """
        logits = self.head(self.depth(self.embed(tokens)))
        if targets is None:
            return logits, None
        return logits, self.model.loss(logits, tokens, targets)

    def embed(self, tokens: TokenIds) -> TokenRows:
        """X_0. Errors as `GPT.embed`."""
        return self.model.embed(tokens)

    def head(self, x: TokenRows) -> Float[Tensor, "*batch tokens vocab"]:
        """The logits of the final state, without a norm."""
        return self.model.head(x)

    def trajectory(self, tokens: TokenIds, **options: Any) -> Solution:
        """X at the end of each step, from X_0 = embed(tokens). Takes the options of
        `ctrans.dynamics.scheme.trajectory`.
        """
        return trajectory(self.depth, self.embed(tokens), **options)
