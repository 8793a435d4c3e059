"""Three shapes of ODEs for solvers: a small one, a batch of 4,096, and a Transformer's depth, each
for torch and for jax.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import Segment, solve

BLOCKS, WIDTH, HEADS, STEP = 48, 64, 4, 0.1
Field = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Segments with the state at the start, and the tolerance of adaptive methods.

    - `jax(method, each)`: diffrax's solve of the same problem, jitted; `each` if every row has its
      own steps
    - `model`: the model, if the segments are its depth. Rows are then no problems of their own
    """

    name: str
    segments: list[Segment]
    x0: Tensor
    tolerance: float
    jax: Callable[..., Callable[[Any], Any]]
    model: GPT | None = None

    @property
    def rows(self) -> bool:
        """Whether each row of the state is an ODE of its own."""
        return self.model is None

    def exact(self) -> Tensor:
        """The end by tsit5 at 1e-9, in float64."""
        model = None if self.model is None else copy.deepcopy(self.model).double()
        segments = self.segments if model is None else model.depth.segments()
        return solve(segments, self.x0.double(), method="tsit5", rtol=1e-9, atol=1e-9).x1

    @property
    def ends(self) -> list[Tensor]:
        """The two times of each segment."""
        return [
            torch.tensor([segment.start, segment.end], dtype=torch.float64, device=self.x0.device)
            for segment in self.segments
        ]


def lotka_volterra(t: Tensor, x: Tensor) -> Tensor:
    a, b = x.unbind(-1)
    return torch.stack((1.5 * a - a * b, a * b - 3 * b), -1)


def small(device: str = "cpu") -> Shape:
    """Lotka and Volterra's two species to t = 10."""
    x0 = torch.tensor([[1.0, 1.0]], dtype=torch.float64, device=device)

    def in_jax(method: str, *, each: bool) -> Callable[[Any], Any]:
        import jax.numpy as jnp

        def field(t: Any, x: Any, args: Any) -> Any:
            a, b = x[..., 0], x[..., 1]
            return jnp.stack((1.5 * a - a * b, a * b - 3 * b), -1)

        return _diffrax(method, [(field, None)], 10.0, 1e-6, each=each)

    return Shape(
        "2 species, batch 1, float64", [Segment(0.0, 10.0, lotka_volterra)], x0, 1e-6, in_jax
    )


def batch(device: str = "cpu") -> Shape:
    """x' = tanh(x W') - x/10 to t = 5: 4,096 rows of 8 entries, float32."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=random)
    weight = (weight - weight.T).to(device)
    x0 = torch.randn(4096, 8, generator=random).to(device)

    def in_jax(method: str, *, each: bool) -> Callable[[Any], Any]:
        import jax.numpy as jnp

        w = jnp.asarray(weight.cpu().numpy())
        return _diffrax(
            method, [(lambda t, x, args: jnp.tanh(x @ w.T) - x / 10, None)], 5.0, 1e-4, each
        )

    def field(t: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ weight.to(x.dtype).T) - x / 10

    return Shape("4,096 rows of 8, float32", [Segment(0.0, 5.0, field)], x0, 1e-4, in_jax)


def transformer(device: str = "cpu") -> Shape:
    """The 96 sublayers of 48 peri blocks of width 64, each a segment of length 0.1; 2 x 32 tokens,
    float32.
    """
    config = GPTConfig(
        vocab_size=65, context=32, depth=BLOCKS, width=WIDTH, heads=HEADS, placement="peri", dt=STEP
    )
    model = GPT(config).requires_grad_(requires_grad=False).to(device)
    x0 = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    segments = model.depth.segments()

    def in_jax(method: str, *, each: bool) -> Callable[[Any], Any]:
        return _diffrax(method, _jax_blocks(model), STEP, 1e-4, each=each)

    return Shape("a Transformer of 48 blocks, float32", segments, x0, 1e-4, in_jax, model)


def _jax_blocks(model: GPT) -> list[tuple[Field, Any]]:
    """The attentions and FFNs as two fields, with the weights of all blocks stacked."""
    import jax
    import jax.numpy as jnp

    def stacked(parts: list[Any]) -> dict[str, Any]:
        own = [dict(part.named_parameters()) for part in parts]
        return {
            name: jnp.asarray(torch.stack([each[name] for each in own]).cpu().numpy())
            for name in own[0]
        }

    def norm(x: Any, p: dict[str, Any], name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return (
            x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"]
            + p[f"{name}.bias"]
        )

    def linear(x: Any, p: dict[str, Any], name: str) -> Any:
        return x @ p[f"field.{name}.weight"].T + p[f"field.{name}.bias"]

    def attention(t: Any, x: Any, p: dict[str, Any]) -> Any:
        n, tokens, width = x.shape
        q, k, v = jnp.split(
            linear(norm(x, p, "input_norm"), p, "qkv").reshape(n, tokens, 3, HEADS, -1), 3, axis=2
        )
        q, k, v = (each[:, :, 0] for each in (q, k, v))
        scores = jnp.einsum("nihd,njhd->nhij", q, k) / (width // HEADS) ** 0.5
        seen = jnp.tril(jnp.ones((tokens, tokens), bool))
        mixed = jnp.einsum(
            "nhij,njhd->nihd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v
        )
        return norm(linear(mixed.reshape(n, tokens, width), p, "out"), p, "output_norm")

    def ffn(t: Any, x: Any, p: dict[str, Any]) -> Any:
        hidden = jax.nn.gelu(linear(norm(x, p, "input_norm"), p, "up"), approximate=False)
        return norm(linear(hidden, p, "down"), p, "output_norm")

    parts = list(model.depth.sublayers)
    return [(attention, stacked(parts[::2])), (ffn, stacked(parts[1::2]))]


def _diffrax(
    method: str, fields: list[tuple[Field, Any]], end: float, tolerance: float, *, each: bool
) -> Callable[[Any], Any]:
    """A jitted solve. Several fields take turns, with their stacked weights, each over a segment
    from 0 to `end`.
    """
    import diffrax
    import jax

    solver = {"tsit5": diffrax.Tsit5, "dopri5": diffrax.Dopri5}[method]()
    control = diffrax.PIDController(rtol=tolerance, atol=tolerance)

    def segment(field: Field, x: Any, weights: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            solver,
            0.0,
            end,
            None,
            x,
            args=weights,
            stepsize_controller=control,
            saveat=diffrax.SaveAt(t1=True),
            max_steps=4096,
        ).ys[0]

    def whole(x: Any) -> Any:
        if fields[0][1] is None:
            return segment(fields[0][0], x, None)

        def block(x: Any, weights: Any) -> tuple[Any, None]:
            for (field, _), own in zip(fields, weights, strict=True):
                x = segment(field, x, own)
            return x, None

        return jax.lax.scan(block, x, [weights for _, weights in fields])[0]

    return jax.jit(jax.vmap(whole) if each else whole)


SHAPES: dict[str, Callable[..., Shape]] = {
    "small": small,
    "batch": batch,
    "transformer": transformer,
}
