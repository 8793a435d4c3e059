"""The monitor's hooks in a model, and what they measure of one pass: states, velocities, costates,
scores, routing and logits.

The figures stay on the device until `Gauges.read` moves all of them to the host at once. Hooks
change no bit of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Balances
from ctrans.interop.map_outputs import MapOutput
from ctrans.interop.recorded_calls import first_tensor
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.measure.forward.bounds import needs_radius
from ctrans.measure.reductions import (
    SAMPLE,
    evenness,
    length,
    longest,
    norm_of,
    sample,
    sample_rows,
)
from ctrans.training.monitor.fitted_lengths import FittedLengths
from ctrans.training.monitor.hooks import Hook, in_a_line, local, state_in, traced
from ctrans.training.monitor.scores import SeenScores, scores_seen, weight_ahead
from ctrans.training.monitor.sites import Site, Sites
from ctrans.training.monitor.training_measures import TINY, GaugeAt, Scope, measures_of


class PassHooks:
    """The hooks of one model. `arm` adds them, `disarm` removes them, `take` returns the figures of
    the passes between, by gauge and place.
    """

    def __init__(self, sites: Sites):
        self.sites = sites
        self.missing: dict[str, str] = {}
        """Errors in hooks since `arm`, by place. Hooks never raise into a training."""
        self.hooks = ExitStack()
        self.half = False
        """Whether the last state was in float16."""
        self._modes = ExitStack()
        self._looking = False
        self._begin()

    def _begin(self) -> None:
        self.missing = {}
        self._figures: dict[GaugeAt, Tensor] = {}
        self._parts_of_velocity: dict[int, dict[int, Tensor]] = {}
        self._sum: Tensor | None = None
        """x + h r of the last part, before its norm; None without one."""
        self._start: Tensor | None = None
        self._last: Tensor | None = None
        self._returning = False
        self._lengths = FittedLengths()

    @property
    def seen(self) -> bool:
        """Whether a pass went through the depth since `arm`."""
        return ("rms", 0) in self._figures

    def arm(self, *, looking: bool = False) -> None:
        """Measures the next pass through each module: one of the training, with gradients and the
        model in training mode, or with `looking` any pass.
        """
        self.disarm()
        self._looking = looking
        self._begin()
        if self.sites.stream is not None:
            self._watch_sums(self.sites.stream)
        for site in self.sites.by_depth:
            if site.enter is not None:
                self._before(site.enter, site, self._entered)
            for index, way_out in enumerate(site.exits):
                self._behind(way_out.module, site, partial(self._left, index, way_out))
            if site.state_norm is not None:
                self._behind(site.state_norm, site, self._ended)
                if site.may_learn_length:
                    self._before(site.state_norm, site, self._summed)
            if site.block_module is not None:
                self._behind(site.block_module, site, self._left_last_block)
            if site.attention is not None:
                self._before(site.attention, site, self._attending)
                self._behind(site.attention, site, lambda *_: self._modes.close(), always=True)
            if isinstance(site.router, Balances):
                self._before(site.router, site, self._sent)
            elif site.router is not None:
                self._behind(site.router, site, self._routed)
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

    def take(self) -> dict[GaugeAt, Tensor]:
        """Removes the hooks. Returns the figures since `arm`; none if a pass left out a state."""
        self.disarm()
        self._logits_of_own_model()
        figures = self._figures
        self._figures = {}
        self._start = None
        self._last = None
        if "states" in self.missing:
            return {}
        return figures

    def _before(self, module: nn.Module, site: Site, look: Callable[[Site, Tensor], None]) -> None:
        """Looks at the state that the module gets."""

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if traced():
                return
            x = state_in((*args, *kwargs.values()))
            if x is not None:
                self._try(site.place, look, site, x)

        # before other hooks: those of sequence parallelism hand on a copy of the state, without its
        # skip path
        self.hooks.callback(
            module.register_forward_pre_hook(Hook(hook), prepend=True, with_kwargs=True).remove
        )

    def _behind(
        self,
        module: nn.Module,
        site: Site,
        look: Callable[[Site, Any, Sequence[Any]], None],
        *,
        always: bool = False,
    ) -> None:
        """Looks at the module's output and its arguments; with `always` also after an error."""

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            y = first_tensor(output)
            if not traced() and (isinstance(y, Tensor) or always):
                self._try(site.place, look, site, y, (*args, *kwargs.values()))

        self.hooks.callback(
            module.register_forward_hook(Hook(hook), with_kwargs=True, always_call=always).remove
        )

    def _watch_sums(self, stream: StreamAdapter) -> None:
        """The hooks of a model that is read by its sums: modes of its passes show the states, and
        the scores between them.
        """
        count = len(self.sites.by_depth)
        at = -1
        calls = 0

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal at, calls
            calls += 1
            if calls == 1 and self._measures and not traced():  # a model may call itself
                at = -1
                self._modes.enter_context(scores_seen(scored, partial(self._failed, "attention")))
                self._modes.enter_context(stream.states(met, summed))
                x = state_in((*args, *kwargs.values()))
                if stream.begins_with_its_input and x is not None:
                    met(0, x)

        def scored(scores: SeenScores) -> None:
            if 0 <= at < count:
                self._scored(at, scores)

        def summed(k: int, y: Tensor) -> None:
            has_norm = self.sites.by_depth[k].sublayer.state_norm is not None
            if k == at and self._measures and has_norm:
                self._sum = stream.axes.rows(y.detach(), k + 1).clone()

        def met(k: int, x: Tensor) -> Tensor:
            nonlocal at
            if k == at + 1 and self._measures:
                at = k
                self._try(f"state {k}", self._met, stream, k, x)
            return x

        def end(*_: object) -> None:
            nonlocal calls
            calls -= 1
            if calls:
                return
            self._modes.close()
            if self.seen and at != count:
                self.missing["states"] = (
                    "a pass left out a sum (stochastic depth), or ran it without gradients"
                    " (checkpoints)"
                )

        self.hooks.callback(
            self.sites.root.register_forward_pre_hook(Hook(begin), with_kwargs=True).remove
        )
        self.hooks.callback(
            self.sites.root.register_forward_hook(Hook(end), always_call=True).remove
        )

    def _try(self, where: str, look: Callable[..., None], *args: Any) -> None:
        """Notes any exception in `missing`: users' models may raise anything, and a training must
        not stop for a figure.
        """
        try:
            look(*args)
        except Exception as error:
            self._failed(where, error)

    def _failed(self, where: str, error: Exception) -> None:
        self.missing.setdefault(where, in_a_line(error))

    @property
    def _measures(self) -> bool:
        """Whether the present pass is to be measured."""
        return self._looking or (torch.is_grad_enabled() and self.sites.root.training)

    def _lacks(self, name: str, k: int) -> bool:
        """Whether the present pass is to be measured and has no such figure yet."""
        return self._measures and (name, k) not in self._figures

    def _measure(self, scope: Scope, k: int, x: Tensor) -> None:
        """Adds the gauges of that scope that have a measurement, unless the pass has them."""
        for name, measure in measures_of(scope).items():
            if (name, k) not in self._figures:
                try:
                    self._figures[name, k] = torch.as_tensor(measure(x))
                except Exception as error:  # a user's function may raise anything
                    self.missing.setdefault(f"the gauge {name}", in_a_line(error))

    def _met(self, stream: StreamAdapter, k: int, state: Tensor) -> None:
        """Measures X_k of a model that is read by its sums."""
        x = stream.axes.rows(state.detach(), k)
        summed = self._sum
        self._sum = None
        if k and self._last is not None and self._lacks("velocity", k - 1):
            site = self.sites.by_depth[k - 1]
            y = x
            if summed is not None:  # N(a x + f) = N_a(x + f/a), of which a is the norm's
                y = summed / getattr(site.sublayer.state_norm, "stretch", 1.0)
            self._moved(site, (y - site.sublayer.enter(self._last)) / site.length)
            if k == len(self.sites.by_depth) and self._lacks("rms", k):
                self._arrived(x)
        if k < len(self.sites.by_depth):
            # the model may change it in place
            self._entered(self.sites.by_depth[k], state, x.clone())

    def _entered(self, site: Site, state: Tensor, x: Tensor | None = None) -> None:
        """Measures X_k and, in the backward pass, dL/dX_k. `x` are the values of the state."""
        k = site.k
        if k == 0 and self.seen and self._measures and not self._has_costates():
            # the pass before had no backward pass: an error ended it, or nothing was to learn from
            # it
            self._begin()
        if not self._lacks("rms", k):
            return
        if x is None:
            x = local(state.detach())
        with torch.no_grad():
            self._state(k, x)
            if needs_radius(site.sublayer):
                self._figures["radius", k] = longest(x)
            if site.may_learn_length:
                self._lengths.enter(k, x)
        if k and self.sites.by_depth[k - 1].state_norm is None:
            self._summed(self.sites.by_depth[k - 1], x)
        if state.requires_grad:
            # removed again: X_0 may be a leaf that the next pass uses too
            self.hooks.callback(
                state.register_hook(lambda p: self._try(site.place, self._returns, k, p)).remove
            )
        self._last = x

    def _has_costates(self) -> bool:
        return any(name == "costate" for name, _ in self._figures)

    def _returns(self, k: int, p: Tensor) -> None:
        """dL/dX_k in the backward pass, unchanged. Before the first one, the weights of the first
        sublayer have only gradients of before.
        """
        if k and not self._returning:
            weights = self.sites.by_depth[0].sublayer.parameters()
            gradients = [weight.grad for weight in weights if weight.requires_grad]
            self._figures["earlier_gradient", 0] = norm_of(
                [gradient for gradient in gradients if gradient is not None]
            )
        self._returning = True
        self._figures.setdefault(("costate", k), length(local(p.detach())))

    def _left(
        self, index: int, way_out: MapOutput, site: Site, y: Tensor, args: Sequence[Any]
    ) -> None:
        """Notes one of the outputs whose sum is the raw velocity, and measures the sum of all."""
        k = site.k
        if not self._lacks("velocity", k) or ("rms", k) not in self._figures:
            return
        with torch.no_grad():
            parts = self._parts_of_velocity.setdefault(k, {})
            parts.setdefault(index, way_out.velocity(args, y.detach()))
            if len(parts) < len(site.exits):
                return
            velocity = sum(self._parts_of_velocity.pop(k).values())
            self._moved(site, velocity)  # type: ignore[arg-type]  # there is at least one

    def _moved(self, site: Site, r: Tensor) -> None:
        """Measures the raw velocity, and behind the last sublayer X_K."""
        k = site.k
        r = local(r)
        with torch.no_grad():
            self._measure("sublayer", k, r)
            self._figures["longest", k] = longest(r)
            if site.may_learn_length:
                self._lengths.move(k, r)
            else:
                self._figures["step_share", k] = site.length * self._velocity_over_state(k)
            if site.block_module is not None:
                return  # it returns X_K
            is_last = k + 1 == len(self.sites.by_depth) and site.sublayer.state_norm is None
            if is_last and self._last is not None:
                self._arrived(self._last.reshape(r.shape) + site.length * r)

    def _velocity_over_state(self, k: int) -> Tensor:
        """|r_k|/|X_k|."""
        return self._figures["velocity", k] / self._figures["rms", k].clamp(min=TINY)

    def _summed(self, site: Site, total: Tensor) -> None:
        """Measures the step of a length that may be learned, from X_k + h r_k."""
        if ("velocity", site.k) not in self._figures or not self._lacks("step_share", site.k):
            return
        with torch.no_grad():
            length_of_step = self._lengths.leave(site.k, local(total.detach()))
            if length_of_step is not None:
                share = length_of_step.abs() * self._velocity_over_state(site.k)
                self._figures["step_share", site.k] = share

    def _left_last_block(self, site: Site, y: Tensor, args: Sequence[Any]) -> None:
        """Measures X_K, which the last block returns."""
        if ("velocity", site.k) in self._figures and self._lacks("rms", site.k + 1):
            self._summed(site, y)
            with torch.no_grad():
                self._arrived(local(y.detach()))

    def _ended(self, site: Site, y: Tensor, args: Sequence[Any]) -> None:
        """Measures X_K behind its norm."""
        if site.k + 1 == len(self.sites.by_depth) and self._lacks("rms", site.k + 1):
            with torch.no_grad():
                self._arrived(local(y.detach()))

    def _arrived(self, x: Tensor) -> None:
        """Measures the last state X_K."""
        self._state(len(self.sites.by_depth), x)
        self._last = x

    def _state(self, k: int, x: Tensor) -> None:
        """Measures X_k, and its distance from X_0."""
        self.half = x.dtype == torch.float16
        self._measure("state", k, x)
        rows = sample_rows(x)
        if k == 0:
            self._start = rows.clone()
        elif self._start is not None and rows.shape == self._start.shape:
            self._figures["added", k] = torch.linalg.vector_norm(rows - self._start)

    def _attending(self, site: Site, x: Tensor) -> None:
        """Measures the scores of an attention until it ends."""
        if self._lacks("logit", site.k):
            self._modes.close()  # of an attention that has not ended
            self._modes.enter_context(
                scores_seen(partial(self._scored, site.k), partial(self._failed, site.place))
            )

    def _scored(self, k: int, scores: SeenScores) -> None:
        """Measures the scores of an attention, unless the pass has them of an earlier one."""
        self._measure("head", k, scores.entries)
        if ("ahead", k) not in self._figures:
            self._figures["ahead", k] = weight_ahead(*scores)

    def _sent(self, site: Site, x: Tensor) -> None:
        """Routing of ctrans's own maps, from their load of a sample of tokens."""
        if self._lacks("routing", site.k):
            with torch.no_grad():
                load = site.router.load(sample(x))  # type: ignore[union-attr, operator]  # it is such a map
                self._figures["routing", site.k] = evenness(load / load.sum())

    def _routed(self, site: Site, y: Tensor, args: Sequence[Any]) -> None:
        """Routing of other maps, from the first choice of each token."""
        if self._lacks("routing", site.k) and y.is_floating_point() and y.shape[-1] > 1:
            with torch.no_grad():
                chosen = y.detach().reshape(-1, y.shape[-1]).argmax(-1)
                counts = torch.bincount(chosen, minlength=y.shape[-1]).float()
                self._figures["routing", site.k] = evenness(counts / len(chosen))

    def _returned(self, output: Any, arguments: Sequence[Any]) -> None:
        """Measures the logits, and what they say of the tokens among the arguments."""
        if traced() or not self._lacks("log_z", 0):
            return
        logits = self.sites.logits(output)
        if logits is None:
            return
        with torch.no_grad():
            of_sample = logits.detach().reshape(-1, logits.shape[-1])[:SAMPLE]
            self._logits(of_sample, length(logits.detach(), math.inf))
            for x in arguments:
                if isinstance(x, Tensor) and x.shape == logits.shape[:-1] and x.dim() == 2:
                    self._likeliest(logits, x)
                    break

    def _logits(self, of_sample: Tensor, largest: Tensor) -> None:
        # a sample: exponentials of all logits in float32 need as much memory as the loss does
        self._figures["log_z", 0] = of_sample.float().logsumexp(-1).mean()
        self._figures["largest_logit", 0] = largest

    def _likeliest(self, logits: Tensor, tokens: Tensor) -> None:
        """Compares the likeliest successor of each token with the token and the next one."""
        count = max(1, SAMPLE // tokens.shape[1])
        likeliest = logits[:count].argmax(-1)
        tokens = tokens[:count]
        self._figures["copied", 0] = (likeliest == tokens).float().mean()
        self._figures["foreseen", 0] = (likeliest[:, :-1] == tokens[:, 1:]).float().mean()

    def _logits_of_own_model(self) -> None:
        """Logits of ctrans's own models, from the last state in parts: training does not call these
        models as a whole.
        """
        sites = self.sites
        if ("log_z", 0) in self._figures or not sites.of_ctrans or not sites.vocabulary:
            return
        if ("rms", len(sites.by_depth)) not in self._figures or self._last is None:
            return
        if any(hasattr(p, "full_tensor") for p in sites.root.parameters()):
            return  # no process has all weights of the head
        with torch.no_grad():
            weight = next(sites.root.parameters())
            tokens = self._last
            if tokens.dim() > 2:
                tokens = tokens.flatten(0, 1)
            largest = []
            of_sample = None
            for part in tokens.to(weight.dtype).split(SAMPLE):
                logits = sites.model.head(part.unsqueeze(0)).flatten(0, -2)
                largest.append(length(logits, math.inf))
                if of_sample is None:
                    of_sample = logits
            if of_sample is not None:
                self._logits(of_sample, torch.stack(largest).max())
