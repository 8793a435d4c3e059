"""Figures of a training from its own passes, by hooks on the steps that report.

The figures stay on the device until `Gauges.read` moves all of them to the host at once. Hooks
change no bit of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Balances, TokenBound
from ctrans.interop.map_outputs import MapOutput
from ctrans.interop.recorded_calls import first_tensor
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.measure.forward.bounds import needs_radius
from ctrans.measure.reductions import (
    SAMPLE,
    evenness,
    growth_exponent,
    length,
    longest,
    norm_of,
    sample,
    sample_rows,
    to_host,
)
from ctrans.training.monitor.bound_shares import bound_shares
from ctrans.training.monitor.hooks import Hook, in_a_line, local, state_in, traced
from ctrans.training.monitor.scores import ScoresSeen
from ctrans.training.monitor.sites import Site, Sites, own_parameters
from ctrans.training.monitor.training_measures import (
    GAUGES,
    TINY,
    Figures,
    GaugeAt,
    Scope,
    measures_of,
)
from ctrans.training.monitor.updates import Updates

OF_GRADIENTS = ("costate", "gradient", "gradient_outside")


class Gauges:
    """The hooks of one model and their figures. `arm` adds the hooks, `disarm` removes them, `read`
    returns the figures.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Gauges, (self.sites,)  # a copy has no hooks

    def __init__(self, sites: Sites):
        self.sites = sites
        self.updates = Updates()
        self.map_bounds: list[TokenBound | None] = []
        """Bounds on the outputs of maps at the next `read`'s weights, if a probe found them."""
        self.unknown: dict[str, str] = {}
        """Errors in hooks since `arm`, by place. Hooks never raise into a training."""
        self.hooks = ExitStack()
        self._modes = ExitStack()
        self._found: dict[GaugeAt, Tensor] = {}
        self._left_so_far: dict[int, dict[int, Tensor]] = {}
        self._looking = False
        self._start: Tensor | None = None
        self._last: Tensor | None = None
        self.half = False
        self.heads: list[int] | None = None
        """The number of heads of each sublayer, from its scores; None before the first ones."""
        self.broken: list[GaugeAt] = []
        """(gauge, place) of the figures of the last `read` that are inf or nan, in the order of a
        pass.
        """

    @property
    def seen(self) -> bool:
        """Whether a pass went through the depth since `arm`."""
        return ("rms", 0) in self._found

    def arm(self, *, looking: bool = False) -> None:
        """Measures the next pass through each module: one of the training, with gradients and the
        model in training mode, or with `looking` any pass.
        """
        self.disarm()
        self._looking = looking
        self._begin()
        if self.sites.stream is not None:
            self._watch(self.sites.stream)
        for site in self.sites.sites:
            if site.enter is not None:
                self._pre(site.enter, site, self._entered)
            for place, way_out in enumerate(site.exits):
                self._post(way_out.module, site, partial(self._left, place, way_out))
            if site.state_norm is not None:
                self._post(site.state_norm, site, self._ended)
            if site.attention is not None:
                self._pre(site.attention, site, self._attending)
                self._post(site.attention, site, lambda *_: self._modes.close(), always=True)
            if isinstance(site.router, Balances):
                self._pre(site.router, site, self._sent)
            elif site.router is not None:
                self._post(site.router, site, self._routed)
        returned = Hook(
            lambda _, args, kwargs, output: self._try(
                "logits", self._returned, output, (*args, *kwargs.values())
            )
        )
        self.hooks.callback(
            self.sites.root.register_forward_hook(returned, with_kwargs=True).remove
        )

    def disarm(self) -> None:
        self.hooks.close()
        self._modes.close()

    def _watch(self, stream: StreamAdapter) -> None:
        """The hooks of a model that is read by its sums: modes of its passes show the states, and
        the scores between them.
        """
        count = len(self.sites.sites)
        at = -1
        calls = 0

        def begin(*_: object) -> None:
            nonlocal at, calls
            calls += 1
            if calls == 1 and self._wanted and not traced():  # a model may call itself
                at = -1
                self._modes.enter_context(ScoresSeen(scored, partial(self._failed, "attention")))
                self._modes.enter_context(stream.states(met))

        def scored(scores: Tensor) -> None:
            if 0 <= at < count:
                self._measure("head", at, scores)

        def met(k: int, x: Tensor) -> Tensor:
            nonlocal at
            if k == at + 1 and self._wanted:
                at = k
                self._try(f"state {k}", self._met, stream, k, x)
            return x

        def end(*_: object) -> None:
            nonlocal calls
            calls -= 1
            if not calls:
                self._modes.close()
                if self.seen and at != count:
                    self.unknown["states"] = (
                        "a pass left out a sum (stochastic depth), or ran it without gradients"
                        " (checkpoints)"
                    )

        self.hooks.callback(self.sites.root.register_forward_pre_hook(Hook(begin)).remove)
        self.hooks.callback(
            self.sites.root.register_forward_hook(Hook(end), always_call=True).remove
        )

    def _met(self, stream: StreamAdapter, k: int, own: Tensor) -> None:
        """Measures the model's own X_k."""
        x = stream.rows(own.detach())
        if k and self._last is not None and self._new("velocity", k - 1):
            self._moved(self.sites.sites[k - 1], x - self._last)
        if k < len(self.sites.sites):
            self._entered(self.sites.sites[k], own, x.clone())  # the model may change it in place

    def _begin(self) -> None:
        self._found = {}
        self._left_so_far = {}
        self.unknown = {}
        self._start = None
        self._last = None
        self._returning = False

    def read(
        self,
        optimizer: torch.optim.Optimizer | None,
        clip: float | None = None,
        scale: float | None = None,
        *,
        unscaled: bool = False,
    ) -> Figures:
        """Returns all figures of the passes since `arm`, and of the present gradients and weights.

        Gradients are those of `scale` times the loss. Their figures are divided by it, and are nan
        where they overflow: the scaler then skips the step. With `unscaled`, the gradients of the
        weights no longer have that factor. With `clip`, you will clip them after this: Adam's
        figures are those of clipped ones.
        """
        self.disarm()
        self._heads_of_model()
        if "states" in self.unknown:
            found = {}
        else:
            found = self._found
        self._found = {}
        inside, outside = own_parameters(self.sites)
        if all(p.grad is None for group in (*inside, outside) for p in group):
            self.unknown["gradients"] = (
                "no weight has one: call step after backward, and before an optimiser that takes"
                " them"
            )
        else:
            for k, parameters in enumerate(inside):
                if any(
                    p.requires_grad for p in parameters
                ):  # frozen weights have no figure, rather than 0
                    found["gradient", k] = norm_of(
                        [p.grad for p in parameters if p.grad is not None]
                    )
            found["gradient_outside", 0] = norm_of([p.grad for p in outside if p.grad is not None])
        if scale is None or unscaled:
            of_weights = 1.0
        else:
            of_weights = scale
        if scale is not None:
            for key in [key for key in found if key[0] in OF_GRADIENTS]:
                if key[0] == "costate":
                    divisor = scale
                else:
                    divisor = of_weights
                found[key] = torch.where(found[key].isfinite(), found[key] / divisor, math.nan)
        if clip is None:
            cut = torch.ones(())
        else:
            cut = self._clip_factor(found, clip)
        if clip is None and of_weights == 1:
            factor = None
        else:
            factor = cut / of_weights
        found.update(self.updates.figures([*inside, outside], optimizer, factor))
        self._start = self._last = None
        values = self._on_host(found)
        values.update(bound_shares(self.sites, self.map_bounds, values))
        return self._figures(values, scaled=scale is not None)

    def _on_host(self, found: Mapping[GaugeAt, Tensor]) -> dict[GaugeAt, list[float]]:
        try:
            return to_host(found)
        except Exception:
            # what cannot be read, such as a tensor inside torch.func.vmap, costs its own figure
            # only
            values: dict[GaugeAt, list[float]] = {}
            for key, value in found.items():
                self._try(
                    f"the gauge {key[0]}", lambda one: values.update(to_host(one)), {key: value}
                )
            return values

    def _clip_factor(self, found: Mapping[GaugeAt, Tensor], clip: float) -> Tensor:
        """The factor that clips the norm of all gradients to `clip`."""
        parts = [
            found["gradient", k] for k in range(len(self.sites.sites)) if ("gradient", k) in found
        ]
        outside = found.get(("gradient_outside", 0), torch.zeros(()))
        if parts:  # none if all sublayers are frozen
            outside = outside.to(parts[0])
        return (clip / length(torch.stack([*parts, outside])).clamp(min=TINY)).clamp(max=1.0)

    def sample_weights(self) -> None:
        """Keeps a sample of the weights, so that the next `read` can measure one step of the
        optimiser.
        """
        inside, outside = own_parameters(self.sites)
        self.updates.remember([*inside, outside])

    def _pre(self, module: nn.Module, site: Site, look: Callable[[Site, Tensor], None]) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if traced():
                x = None
            else:
                x = state_in((*args, *kwargs.values()))
            if x is not None:
                self._try(site.place, look, site, x)

        # before other hooks: those of sequence parallelism hand on a copy of the state, without its
        # skip path
        self.hooks.callback(
            module.register_forward_pre_hook(Hook(hook), prepend=True, with_kwargs=True).remove
        )

    def _post(
        self,
        module: nn.Module,
        site: Site,
        look: Callable[[Site, Any, Sequence[Any]], None],
        *,
        always: bool = False,
    ) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            y = first_tensor(output)
            if not traced() and (isinstance(y, Tensor) or always):
                self._try(site.place, look, site, y, (*args, *kwargs.values()))

        self.hooks.callback(
            module.register_forward_hook(Hook(hook), with_kwargs=True, always_call=always).remove
        )

    def _try(self, where: str, look: Callable[..., None], *given: Any) -> None:
        """Notes any exception in `unknown`: users' models may raise anything, and a training must
        not stop for a figure.
        """
        try:
            look(*given)
        except Exception as error:
            self._failed(where, error)

    def _failed(self, where: str, error: Exception) -> None:
        self.unknown.setdefault(where, in_a_line(error))

    @property
    def _wanted(self) -> bool:
        """Whether the pass is to be measured."""
        return self._looking or (torch.is_grad_enabled() and self.sites.root.training)

    def _new(self, name: str, place: int) -> bool:
        """Whether the pass is to be measured and has no such figure yet."""
        return self._wanted and (name, place) not in self._found

    def _entered(self, site: Site, own: Tensor, x: Tensor | None = None) -> None:
        k = site.k
        if (
            k == 0
            and self.seen
            and self._wanted
            and not any(name == "costate" for name, _ in self._found)
        ):
            # the pass before had no backward pass: an error ended it, or nothing was to learn from
            # it
            self._begin()
        if not self._new("rms", k):
            return
        if x is None:
            x = local(own.detach())
        else:
            x = x
        with torch.no_grad():
            self._state(k, x)
            if needs_radius(site.sublayer):
                self._found["radius", k] = longest(x)
        if own.requires_grad:
            # removed again: X_0 may be a leaf that the next pass uses too
            self.hooks.callback(
                own.register_hook(lambda p: self._try(site.place, self._returns, k, p)).remove
            )
        self._last = x

    def _returns(self, k: int, p: Tensor) -> None:
        """dL/dX_k in the backward pass, unchanged. Before the first one, the weights of the first
        sublayer have only gradients of before.
        """
        if k and not self._returning:
            kept = [
                weight.grad
                for weight in self.sites.sites[0].sublayer.parameters()
                if weight.requires_grad
            ]
            self._found["earlier_gradient", 0] = norm_of(
                [grad for grad in kept if grad is not None]
            )
        self._returning = True
        self._found.setdefault(("costate", k), length(local(p.detach())))

    def _left(
        self, place: int, way_out: MapOutput, site: Site, y: Tensor, args: Sequence[Any]
    ) -> None:
        k = site.k
        if not self._new("velocity", k) or ("rms", k) not in self._found:
            return
        with torch.no_grad():
            parts = self._left_so_far.setdefault(k, {})
            parts.setdefault(place, way_out.velocity(args, y.detach()))
            if len(parts) < len(site.exits):
                return
            self._moved(site, sum(self._left_so_far.pop(k).values()))  # type: ignore[arg-type]  # there is at least one

    def _moved(self, site: Site, r: Tensor) -> None:
        """Measures the raw velocity, and behind the last sublayer X_K."""
        k = site.k
        r = local(r)
        with torch.no_grad():
            self._measure("sublayer", k, r)
            self._found["step_share", k] = (
                site.length * self._found["velocity", k] / self._found["rms", k].clamp(min=TINY)
            )
            self._found["longest", k] = longest(r)
            if (
                k + 1 == len(self.sites.sites)
                and site.state_norm is None
                and self._last is not None
            ):
                self._arrived(self._last.reshape(r.shape) + site.length * r)

    def _ended(self, site: Site, y: Tensor, args: Sequence[Any]) -> None:
        if site.k + 1 == len(self.sites.sites) and self._new("rms", site.k + 1):
            with torch.no_grad():
                self._arrived(local(y.detach()))

    def _arrived(self, x: Tensor) -> None:
        """Measures the last state X_K."""
        self._state(len(self.sites.sites), x)
        if x.dim() > 2:
            self._last = x[:1, :SAMPLE]
        else:
            self._last = x[:SAMPLE].unsqueeze(0)

    def _state(self, k: int, x: Tensor) -> None:
        """Measures X_k, and its distance from X_0."""
        self.half = x.dtype == torch.float16
        self._measure("state", k, x)
        rows = sample_rows(x)
        if k == 0:
            self._start = rows.clone()
        elif self._start is not None and rows.shape == self._start.shape:
            self._found["added", k] = torch.linalg.vector_norm(rows - self._start)

    def _measure(self, scope: Scope, k: int, x: Tensor) -> None:
        """Adds the gauges of that scope that have a measurement, unless the pass has them."""
        for name, measure in measures_of(scope).items():
            if (name, k) not in self._found:
                try:
                    self._found[name, k] = torch.as_tensor(measure(x))
                except Exception as error:  # a user's function may raise anything
                    self.unknown.setdefault(f"the gauge {name}", in_a_line(error))

    def _attending(self, site: Site, x: Tensor) -> None:
        if self._new("logit", site.k):
            self._modes.close()  # of an attention that has not ended
            self._modes.enter_context(
                ScoresSeen(
                    partial(self._measure, "head", site.k), partial(self._failed, site.place)
                )
            )

    def _sent(self, site: Site, x: Tensor) -> None:
        """Routing of ctrans's own maps, from their load of a sample of tokens."""
        if self._new("routing", site.k):
            with torch.no_grad():
                load = site.router.load(sample(x))  # type: ignore[union-attr, operator]  # it is such a map
                self._found["routing", site.k] = evenness(load / load.sum())

    def _routed(self, site: Site, y: Tensor, args: Sequence[Any]) -> None:
        if self._new("routing", site.k) and y.is_floating_point() and y.shape[-1] > 1:
            with torch.no_grad():
                chosen = y.detach().reshape(-1, y.shape[-1]).argmax(-1)
                self._found["routing", site.k] = evenness(
                    torch.bincount(chosen, minlength=y.shape[-1]).float() / len(chosen)
                )

    def _returned(self, output: Any, given: Sequence[Any]) -> None:
        if traced() or not self._new("log_z", 0):
            return
        logits = self.sites.logits(output)
        if logits is not None:
            with torch.no_grad():
                self._logits(logits.detach().reshape(-1, logits.shape[-1])[:SAMPLE])
                tokens = next(
                    (
                        x
                        for x in given
                        if isinstance(x, Tensor) and x.shape == logits.shape[:-1] and x.dim() == 2
                    ),
                    None,
                )
                if tokens is not None:
                    count = max(1, SAMPLE // tokens.shape[1])
                    likeliest = logits[:count].argmax(-1)
                    tokens = tokens[:count]
                    self._found["copied", 0] = (likeliest == tokens).float().mean()
                    self._found["foreseen", 0] = (likeliest[:, :-1] == tokens[:, 1:]).float().mean()

    def _heads_of_model(self) -> None:
        """Logits of ctrans's own models, from the last state's sample: training does not call these
        models as a whole.
        """
        model = self.sites.model
        whole = ("rms", len(self.sites.sites)) in self._found
        if (
            ("log_z", 0) in self._found
            or not whole
            or self._last is None
            or not self.sites.own
            or not self.sites.vocabulary
        ):
            return
        if any(hasattr(p, "full_tensor") for p in self.sites.root.parameters()):
            return  # no process has all weights of the head
        with torch.no_grad():
            weight = next(self.sites.root.parameters())
            self._logits(model.head(self._last.to(weight.dtype)).flatten(0, -2))

    def _logits(self, logits: Tensor) -> None:
        self._found["log_z", 0] = logits.float().logsumexp(-1).mean()
        self._found["largest_logit", 0] = length(logits, math.inf)

    def _figures(self, values: Mapping[GaugeAt, list[float]], *, scaled: bool) -> Figures:
        count = len(self.sites.sites)
        order = [(name, k) for k in range(count + 1) for name in ("rms", "logit", "velocity")]
        order += [("log_z", 0), *(("costate", k) for k in range(count, -1, -1))]
        order += [*(("gradient", k) for k in range(count)), ("gradient_outside", 0)]
        looked = [key for key in order if not (scaled and key[0] in OF_GRADIENTS)]
        self.broken = [key for key in looked if not all(map(math.isfinite, values.get(key, [])))]
        figures: Figures = {}
        if any(name == "logit" for name, _ in values):
            self.heads = [len(values.get(("logit", k), [])) for k in range(count)]
        for name, gauge in GAUGES.items():
            if not any(key[0] == name for key in values):
                continue
            if gauge.scope == "run":
                figures[name] = values[name, 0][0]
            elif gauge.scope == "head":
                figures[name] = [
                    number for k in range(count) for number in values.get((name, k), [])
                ]
            else:
                places = count + (gauge.scope == "state")
                figures[name] = [values.get((name, k), [math.nan])[0] for k in range(places)]
        added = [values.get(("added", k), [math.nan])[0] for k in range(1, count + 1)]
        if (exponent := growth_exponent(added)) is not None:
            figures["growth"] = exponent
        if ("gradient_outside", 0) in values:
            inside = [values.get(("gradient", k), [0.0])[0] for k in range(count)]
            figures["gradient_norm"] = math.hypot(*inside, values["gradient_outside", 0][0])
        return figures
