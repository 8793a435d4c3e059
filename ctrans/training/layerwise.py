"""Training by layerwise maximisation of the augmented Hamiltonian: the extended method of
successive approximations (E-MSA) of Li, Chen, Tai and E, *Maximum principle based algorithms for
deep learning*, JMLR 18 (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.shapes import Scalar, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import HasAuxiliary
from ctrans.dynamics.sublayer import Sublayer
from ctrans.training.adam_step import adam_step
from solvers import ConfigError

EPS = 1e-8
"""Adam's epsilon, for the weights outside of sublayers."""
INNER = 5
"""Iterations of L-BFGS for each sublayer and step."""
MOST_EVALUATIONS = 2
"""Evaluations of the augmented Hamiltonian at most, times the iterations."""
RHO_TIMES_RATE = 0.01
"""rho is this over the learning rate: that of 3e-3, Adam's default, gives rho = 3.3."""


@dataclass(frozen=True)
class PassedSublayer:
    """A sublayer's part of a pass and its way back: its state X_k, its velocity r_k, `pulled` =
    dL/dr_k = dt P_(k+1), and the length dt of its segment.
    """

    x: TokenRows
    velocity: TokenRows
    pulled: TokenRows
    dt: float


def augmented_hamiltonian(velocity: TokenRows, passed: PassedSublayer, rho: float) -> Scalar:
    """-<P_(k+1), dt r> - rho/(2 n) |dt (r - r_k)|^2 over n tokens, for the velocity r that other
    weights give at X_k.

    In terms of the step Phi = X_k + dt r, up to a constant, this is -<P_(k+1), Phi> - rho/(2 n)
    |Phi - X_(k+1)|^2. With a norm around the state, Phi and P are those before the norm. P is the
    gradient of a mean over tokens, so a penalty that is a mean over tokens leaves rho without a
    unit of batch size: a free state would move by -1/rho times the gradient of n L. The term of the
    paper for the costate, |P_k - J'P_(k+1)|^2, is not in it: it would need second derivatives.
    """
    change = passed.dt * (velocity - passed.velocity)
    tokens = velocity.shape[:-1].numel()
    return -(passed.pulled * velocity).sum() - rho / (2 * tokens) * change.square().sum()


class LayerwiseMaximisation(torch.optim.Optimizer):
    """th_k = argmax of the augmented Hamiltonian of sublayer k at X_k and P_(k+1), by a few
    iterations of L-BFGS from the present weights, for all sublayers at the states and costates of
    one pass. Other weights take steps of AdamW. Decay is decoupled, after the step.

    - `inner`: iterations of L-BFGS; rho is `RHO_TIMES_RATE` over the learning rate
    - `passes`: evaluations so far of the velocity of a sublayer with its gradient, apart from those
      of the training's own passes

    A maximisation that ends below its start is undone, so the augmented Hamiltonian never falls.
    Clipping has no effect on it, as it starts from costates. `attach` must be called once.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        *,
        inner: int = INNER,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": EPS, "weight_decay": 0.0})
        self.inner = inner
        self.passes = 0
        self._sublayers: list[Sublayer] = []
        self._passed: dict[int, PassedSublayer] = {}

    def attach(self, depth: Depth) -> None:
        """Records X_k and dL/dr_k of the first pass in training mode after each `zero_grad`. Later
        ones before the step are those of a monitor. Raises ConfigError for a depth that the method
        does not cover.
        """
        check_depth(depth)
        self._sublayers = list(depth.sublayers)
        for k, (sublayer, dt) in enumerate(zip(depth.sublayers, depth.lengths, strict=True)):
            sublayer.register_forward_hook(self._recorder(k, sublayer, dt))

    def _recorder(
        self, k: int, own: Sublayer, dt: float
    ) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def record(sublayer: nn.Module, inputs: tuple[Any, ...], velocity: Tensor) -> None:
            # a copy of the model has this hook too
            if sublayer is not own or not sublayer.training or not velocity.requires_grad:
                return
            x = inputs[0].detach()
            r = velocity.detach()

            def keep(gradient: Tensor) -> None:
                self._passed.setdefault(k, PassedSublayer(x, r, gradient.detach(), dt))

            velocity.register_hook(keep)

        return record

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's
        """Forgets the gradients, and the pass that they are of."""
        super().zero_grad(set_to_none)
        self._passed = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inside = set()
        for k, passed in self._passed.items():
            weights = [weight for weight in self._sublayers[k].parameters() if weight.requires_grad]
            inside |= set(weights)
            rate = self.param_groups[0]["lr"]
            if rate > 0:
                self._maximise(self._sublayers[k], weights, passed, RHO_TIMES_RATE / rate)
        self._passed = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight not in inside:
                    adam_step(weight, group, self.state[weight])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
        return loss

    def _maximise(
        self, sublayer: Sublayer, weights: Sequence[Tensor], passed: PassedSublayer, rho: float
    ) -> None:
        """Maximises over the sublayer's weights. Without a higher value they stay."""
        gradients = [weight.grad for weight in weights]
        before = [weight.clone() for weight in weights]
        search = torch.optim.LBFGS(
            weights,
            max_iter=self.inner,
            max_eval=MOST_EVALUATIONS * self.inner,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def descended() -> Tensor:
            search.zero_grad()
            with torch.enable_grad():
                # forward, and not the call, which would record
                value = -augmented_hamiltonian(sublayer.forward(passed.x), passed, rho)
                value.backward()
            self.passes += 1
            return value.detach()

        start = float(search.step(descended))
        end = -float(augmented_hamiltonian(sublayer.forward(passed.x), passed, rho))
        # not a number is no improvement either
        if not end <= start:
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def check_depth(depth: Depth) -> None:
    """Raises ConfigError for sublayers that share weights, states of several streams, and maps with
    a loss of their own.
    """
    seen: set[nn.Parameter] = set()
    for sublayer in depth.sublayers:
        weights = set(sublayer.parameters())
        if weights & seen:
            raise ConfigError(
                "optimiser 'msa' maximises over the weights of each sublayer apart, and here"
                " sublayers share weights: choose adamw, or free weights for each block"
            )
        seen |= weights
        if sublayer.streams > 1:
            raise ConfigError(
                f"optimiser 'msa' is for states of one stream, not {sublayer.streams}: choose"
                " adamw, or another residual"
            )
        for branch in sublayer.branches.values():
            if isinstance(branch.field, HasAuxiliary):
                raise ConfigError(
                    "optimiser 'msa' knows the costate of the loss alone, and this"
                    f" {sublayer.kind} has a loss of its own: choose adamw, or another map"
                )
