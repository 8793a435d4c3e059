"""The figures of a report: those of the passes, of the present gradients and of the last step of
the optimiser, moved to the host at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.old_names import OldReasons
from ctrans.dynamics.fields import TokenBound
from ctrans.measure.reductions import growth_exponent, length, norm_of, to_host
from ctrans.training.monitor.bound_shares import bound_shares
from ctrans.training.monitor.decay import decay_of, shifts_of
from ctrans.training.monitor.hooks import in_a_line
from ctrans.training.monitor.loop_measures import LOOP
from ctrans.training.monitor.loop_reader import ANOTHER_LOSS, THE_TARGETS, LoopReader
from ctrans.training.monitor.pass_hooks import PassHooks
from ctrans.training.monitor.sites import Sites, own_parameters
from ctrans.training.monitor.training_measures import GAUGES, TINY, Figures, GaugeAt
from ctrans.training.monitor.updates import Updates

OF_ALL = ("gradient_of_all", 0)
"""The norm of the gradients of all weights, each once, where sublayers share some."""
OF_GRADIENTS = ("costate", "gradient", "gradient_outside", OF_ALL[0], "target_weight")
"""The gauges that grow with the factor by which the loss is multiplied."""


class Gauges:
    """The figures of one model. `arm` adds its hooks, `disarm` removes them, `read` returns the
    figures.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Gauges, (self.sites,)  # a copy has no hooks

    def __init__(self, sites: Sites):
        self.sites = sites
        self.passes = PassHooks(sites)
        self.loop = LoopReader(sites)
        self.updates = Updates()
        self.map_bounds: list[TokenBound | None] = []
        """Bounds on the outputs of maps at the next `read`'s weights, if a probe found them."""
        self.heads: list[int] | None = None
        """The number of heads of each sublayer, from its scores; None before the first ones."""
        self.broken: list[GaugeAt] = []
        """(gauge, place) of the figures of the last `read` that are inf or nan, in the order of a
        pass.
        """

    unknown = OldReasons()

    @property
    def missing(self) -> dict[str, str]:
        """Errors since `arm`, by place."""
        return self.passes.missing

    @functools.cached_property
    def gain_shifts(self) -> dict[type[nn.Module], float]:
        """`shifts_of` its model: not when this is made, as a pickled model is not whole then."""
        return shifts_of(self.sites.root)

    def arm(self, *, looking: bool = False) -> None:
        """See `PassHooks.arm`."""
        self.passes.arm(looking=looking)
        self.loop.arm(targets=True)

    def arm_batch(self) -> None:
        """Reads only the batch of the next step, with which a report compares its own."""
        self.loop.arm(targets=False)

    def disarm(self) -> None:
        self.passes.disarm()
        self.loop.disarm()

    def sample_weights(self) -> None:
        """Keeps a sample of the weights, so that the next `read` can measure one step of the
        optimiser.
        """
        inside, outside = own_parameters(self.sites)
        self.updates.remember([*inside, outside])

    def read(
        self,
        optimizer: torch.optim.Optimizer | None,
        clip: float | None = None,
        scale: float | None = None,
        *,
        unscaled: bool = False,
        step: int = 0,
    ) -> Figures:
        """Returns all figures of the passes since `arm`, and of the present gradients and weights.

        Gradients are those of `scale` times the loss. Their figures are divided by it, and are nan
        where they overflow: the scaler then skips the step. With `unscaled`, the gradients of the
        weights no longer have that factor. With `clip`, you will clip them after this: Adam's
        figures are those of clipped ones.
        """
        tensors = self.passes.take()
        tensors.update(self.loop.take(step, optimizer))
        for where, why in self.loop.missing.items():
            self.missing.setdefault(where, why)
        inside, outside = own_parameters(self.sites)
        tensors.update(self._gradients(inside, outside))
        weight_scale = 1.0
        if scale is not None:
            if not unscaled:
                weight_scale = scale
            _divide(tensors, scale, weight_scale)
        factor: Tensor | None = None
        if clip is not None:
            factor = self._clip_factor(tensors, clip) / weight_scale
        elif weight_scale != 1:
            factor = torch.ones(()) / weight_scale
        tensors.update(self.updates.figures([*inside, outside], optimizer, factor))
        tensors.update(decay_of(self.sites.root, optimizer, self.gain_shifts))
        values = self._on_host(tensors)
        values.update(bound_shares(self.sites, self.map_bounds, values))
        self.broken = self._broken(values, scaled=scale is not None)
        if any(name == "logit" for name, _ in values):
            count = len(self.sites.by_depth)
            self.heads = [len(values.get(("logit", k), [])) for k in range(count)]
        return self._figures(values)

    def _gradients(
        self, inside: list[list[nn.Parameter]], outside: list[nn.Parameter]
    ) -> dict[GaugeAt, Tensor]:
        """|dL/dW| of each sublayer and of the weights outside of the depth."""
        if all(p.grad is None for group in (*inside, outside) for p in group):
            self.missing["gradients"] = (
                "no weight has one: call step after backward, and before an optimiser that takes"
                " them"
            )
            return {}
        norms: dict[GaugeAt, Tensor] = {}
        for k, group in enumerate(inside):
            # frozen weights have no figure, rather than 0
            if any(p.requires_grad for p in group):
                norms["gradient", k] = norm_of([p.grad for p in group if p.grad is not None])
        norms["gradient_outside", 0] = norm_of([p.grad for p in outside if p.grad is not None])
        every = [p for group in (*inside, outside) for p in group]
        once = list(dict.fromkeys(every))
        if len(once) < len(every):  # sublayers share weights
            norms[OF_ALL] = norm_of([p.grad for p in once if p.grad is not None])
        return norms

    def _clip_factor(self, tensors: Mapping[GaugeAt, Tensor], clip: float) -> Tensor:
        """The factor that clips the norm of all gradients to `clip`."""
        if OF_ALL in tensors:
            return (clip / tensors[OF_ALL].clamp(min=TINY)).clamp(max=1.0)
        count = len(self.sites.by_depth)
        parts = [tensors["gradient", k] for k in range(count) if ("gradient", k) in tensors]
        outside = tensors.get(("gradient_outside", 0), torch.zeros(()))
        if parts:  # none if all sublayers are frozen
            outside = outside.to(parts[0])
        return (clip / length(torch.stack([*parts, outside])).clamp(min=TINY)).clamp(max=1.0)

    def _on_host(self, tensors: Mapping[GaugeAt, Tensor]) -> dict[GaugeAt, list[float]]:
        try:
            return to_host(tensors)
        except Exception:
            # what cannot be read, such as a tensor inside torch.func.vmap, costs its own figure
            # only
            values: dict[GaugeAt, list[float]] = {}
            for key, tensor in tensors.items():
                try:
                    values.update(to_host({key: tensor}))
                except Exception as error:
                    self.missing.setdefault(f"the gauge {key[0]}", in_a_line(error))
            return values

    def _broken(self, values: Mapping[GaugeAt, list[float]], *, scaled: bool) -> list[GaugeAt]:
        """The figures that are inf or nan, in the order of a pass. With `scaled`, gradients do not
        count: a scaler handles their overflow.
        """
        count = len(self.sites.by_depth)
        order = [(name, k) for k in range(count + 1) for name in ("rms", "logit", "velocity")]
        order.append(("log_z", 0))
        if not scaled:
            order += [("costate", k) for k in range(count, -1, -1)]
            order += [("gradient", k) for k in range(count)]
            order.append(("gradient_outside", 0))
        return [key for key in order if not all(map(math.isfinite, values.get(key, [])))]

    def _figures(self, values: Mapping[GaugeAt, list[float]]) -> Figures:
        """The values by gauge, and the figures that follow from them."""
        count = len(self.sites.by_depth)
        names = {name for name, _ in values}
        if any(map(math.isnan, values.get(("target_weight", 0), []))):
            self.missing.setdefault(THE_TARGETS, ANOTHER_LOSS)
        figures: Figures = {}
        for name, gauge in GAUGES.items():
            if name not in names:
                continue
            if gauge.scope == "run":
                value = values[name, 0][0]
                if name not in LOOP or not math.isnan(value):
                    figures[name] = value
            elif gauge.scope == "head":
                by_head = [values.get((name, k), []) for k in range(count)]
                figures[name] = [number for numbers in by_head for number in numbers]
            else:
                places = count
                if gauge.scope == "state":
                    places = count + 1
                figures[name] = [values.get((name, k), [math.nan])[0] for k in range(places)]
        added = [values.get(("added", k), [math.nan])[0] for k in range(1, count + 1)]
        exponent = growth_exponent(added)
        if exponent is not None:
            figures["growth"] = exponent
        if ("gradient_outside", 0) in values:
            inside = [values.get(("gradient", k), [0.0])[0] for k in range(count)]
            figures["gradient_norm"] = math.hypot(*inside, values["gradient_outside", 0][0])
        if OF_ALL in values:
            figures["gradient_norm"] = values[OF_ALL][0]
        return figures


def _divide(tensors: dict[GaugeAt, Tensor], scale: float, weight_scale: float) -> None:
    """Divides the figures of gradients by their scales. Those that overflow become nan."""
    for key, figure in tensors.items():
        if key[0] in OF_GRADIENTS:
            divisor = weight_scale
            if key[0] in ("costate", "target_weight"):
                divisor = scale
            tensors[key] = torch.where(figure.isfinite(), figure / divisor, math.nan)
