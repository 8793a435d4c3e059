"""The OT-Transformer (Kan et al., arXiv:2501.18793): one stack of blocks as the velocity of an ODE,
the same weights at every time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.depth import Depth, check_count, check_dt
from ctrans.interop.config_checks import MOST_PARTS
from ctrans.model.gpt import GPT
from ctrans.model.stack import stacked
from ctrans.scheme import trajectory
from solvers import ConfigError, Solution


@dataclasses.dataclass(frozen=True)
class OTConfig:
    """What an OT-Transformer is: its stack (`depth` blocks whose norms are `stack`), and `steps`
    steps of length `dt` over it.

    `placement` is that of the velocity: "output" where a norm ends it, "none" otherwise. `kinetic`
    is the lmbda that the kinetic cost was trained with. How the weights were drawn is not known.
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
            f"OT-Transformer (nanoGPT): {self.steps} steps of dt = {self.dt:g} over one stack of {self.depth} blocks of width "
            f"{self.width}, {self.heads} heads, placement {self.stack} in it and {self.placement} around it, {self.norm}, "
            f"kinetic cost {self.kinetic:g}"
        )


class OTTransformer(nn.Module):
    """X_{k+1} = X_k + dt N_f(stack(X_k)), `steps` times with the same weights, logits = W_e X_T
    without a norm.

    Made of a GPT, whose blocks become the stack and whose final norm (or none) ends the velocity;
    `dt` is 1/steps times `scale`. It has what instruments ask of a model: `embed`, `depth`, `head`,
    `trajectory`, `config`.
    """

    def __init__(self, model: GPT, steps: int, *, kinetic: float = 0.0, scale: float = 1.0):
        super().__init__()
        check_count("steps", steps, MOST_PARTS)
        norm = None if isinstance(model.final_norm, nn.Identity) else model.final_norm
        model.final_norm = nn.Identity()
        c, dt = model.config, check_dt(check_dt(scale) * (1.0 / steps))
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
        """The same weights with steps that many times as long as 1/steps. Raises ConfigError unless
        it is positive and finite.
        """
        self.depth = Depth(self.depth.sublayers, check_dt(check_dt(scale) * (1.0 / self.config.steps)), per_block=1, shared=True)
        self.config = dataclasses.replace(self.config, dt=self.depth.dt)
        return self

    def native(self) -> GPT:
        """The same model as a GPT with `stack_steps`, to be trained on and saved; it shares the
        weights.

        Raises ConfigError for a velocity that no norm ends (lnf_on = False) though its blocks
        normalise, which no GPT here has.
        """
        c = self.config
        config = dataclasses.replace(self.model.config, stack_steps=c.steps, dt=c.dt)
        if config.placements[-1].ffn.final_norm != (self.depth.sublayers[0].output_norm is not None):
            raise ConfigError(
                "no norm ends the velocity (lnf_on = False), where a GPT's stack of these blocks has one: it stays as it is"
            )
        model = GPT(config)
        model.token_embedding, model.position_embedding = self.model.token_embedding, self.model.position_embedding
        model.depth = self.depth
        return model

    def forward(
        self, tokens: Int[Tensor, "*batch tokens"], targets: Int[Tensor, "*batch tokens"] | None = None
    ) -> tuple[Float[Tensor, "*batch tokens vocab"], Float[Tensor, ""] | None]:
        """The logits, and with `targets` their mean cross-entropy in nats: errors as `GPT.forward`."""
        logits = self.head(self.depth(self.embed(tokens)))
        return logits, None if targets is None else self.model.loss(logits, tokens, targets)

    def embed(self, tokens: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens width"]:
        """X_0, as `GPT.embed`, whose errors it has."""
        return self.model.embed(tokens)

    def head(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens vocab"]:
        """Logits of the final state, which no norm precedes."""
        return self.model.head(x)

    def trajectory(self, tokens: Int[Tensor, "*batch tokens"], **options: Any) -> Solution:
        """X at every step's end, from X_0 = embed(tokens): `ctrans.scheme.trajectory`, whose
        options it has.
        """
        return trajectory(self.depth, self.embed(tokens), **options)
