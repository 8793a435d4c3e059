"""A mixture of experts: FFNs of which each token uses a few, chosen by a router that is trained
with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import Scalar, TokenRows, UnbatchedRows
from ctrans.dynamics.fields.activations import ACTIVATIONS, Activation
from ctrans.dynamics.fields.ffn_bounds import Affine, FFNMaps, length
from ctrans.dynamics.fields.projected_map import ProjectedMap
from ctrans.dynamics.fields.protocols import Matrix, TokenBound
from ctrans.dynamics.fields.routing import EXPERTS, ROUTERS, ExpertOptions, Routing
from ctrans.dynamics.fields.spectral_norm import spectral_norm
from solvers import look_up

SCORES_SLOPE = math.sqrt(0.5)
"""abs(d(s_e - s_e')) <= sqrt(1/2) |dz|: softmax is 1/2-Lipschitz in the Euclidean norm, the sigmoid
1/4.
"""


class MixtureOfExperts(ProjectedMap):
    """f(x) = sum_{e in S(x)} g_e(x) W_2,e h_e(x) + sum_{shared e} W_2,e h_e(x) + b_2, on each token
    alone.

    h_e(x) = phi(W_1,e x + b_1,e), or phi(W_g,e x + b_g,e) * (W_u,e x + b_u,e) for gated experts.
    S(x) are the k routed experts with the largest s_e(W_r x) + b_e, and g the gates on them
    (`Router`; Shazeer et al., arXiv 1701.06538; Switch, 2101.03961; Mixtral, 2401.04088;
    DeepSeekMoE with shared experts, 2401.06066). b balances the load without a loss (`rebalance`;
    2408.15664): it affects only the choice, and gets no gradient. The router computes in float32 at
    least.

    The experts are concatenated in one W_1 and one W_2, so f = W_2 (gates * h) + b_2 with gate 0
    for each expert that a token does not use. `use_reference_kernel`, and a compiler, select this
    form, `pre_projection`. Otherwise tokens are sorted by expert, and each expert computes only its
    own tokens: the same f, up to rounding, at k/E of the work. There are no capacities, and experts
    do not choose tokens, so no token is dropped and none depends on another's choice. f acts on
    each token alone, and stays causal.

    **f is smooth between switches and jumps at them.** If the k-th and (k+1)-th score tie, S
    changes, and f changes by g (W_2,e h_e - W_2,e' h_e'), which for k = 1 no gate makes small. So
    there is no Lipschitz constant unless k = E. Derivatives are those of the present piece, and
    exact for all x' nearer than `distance_to_switch(x)`. Derivatives of a flow lack the jumps at
    the switches that it crosses (theory, "Experts switch").
    """

    projection = "down"
    why_not = "its gates choose between experts, so it is no sum of units"

    def __init__(
        self,
        width: Count,
        hidden: Count,
        *,
        options: ExpertOptions | None = None,
        activation: str = "gelu",
        bias: bool = True,
    ):
        if options is None:
            options = ExpertOptions()
        total = hidden * (options.experts + options.shared_experts)
        gate_activation = EXPERTS[options.expert]
        gated = gate_activation is not None
        matrices = 3 if gated else 2
        super().__init__(matrices * width * total)
        self.options = options
        self.activation = gate_activation or activation
        look_up("activation", self.activation, ACTIVATIONS)
        self.hidden = hidden
        self.gate = nn.Linear(width, total, bias=bias) if gated else None
        self.up = nn.Linear(width, total, bias=bias)
        self.down = nn.Linear(total, width, bias=bias)
        self.router = nn.Linear(width, options.experts, bias=False)
        self.register_buffer("choice_bias", torch.zeros(options.experts))
        self.use_reference_kernel = False

    choice_bias: Tensor

    def forward(self, x: TokenRows) -> TokenRows:
        if self.use_reference_kernel or not x.numel() or torch.compiler.is_compiling():
            return super().forward(x)
        return self._sorted(x.reshape(-1, x.shape[-1])).view_as(x)

    def pre_projection(self, x: TokenRows) -> Float[Tensor, "*batch tokens hidden"]:
        """The input of the output projection: the features of every expert times its gate, which is
        0 for most.
        """
        routed_gates = self.route(x).gates.to(x.dtype)
        shared_gates = routed_gates.new_ones(*routed_gates.shape[:-1], self.options.shared_experts)
        gates = torch.cat([routed_gates, shared_gates], -1)
        gate = None if self.gate is None else _affine(self.gate)
        all_experts = FFNMaps(gate, _affine(self.up), _affine(self.down), self.phi)
        return all_experts.features(x) * gates.repeat_interleave(self.hidden, -1)

    def route(self, x: TokenRows) -> Routing:
        """The experts and gates of each token."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.router.weight.to(wide))
            rule = ROUTERS[self.options.router]
            scores = rule.log_scores(logits).exp()
            ranked = scores.detach() + self.choice_bias.to(wide)
            best = ranked.topk(self.options.top_k, dim=-1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, value=True)
            return Routing(logits, scores, chosen, rule.gates(logits, chosen))

    def auxiliary(self, x: TokenRows) -> Mapping[str, Scalar]:
        """Terms that training may add to its objective, for the tokens x of the map's input:

        - balance: E sum_e f_e P_e, f_e the part of all choices that selected expert e and P_e the
          mean of s_e/sum s; 1 if both are even. Gradients flow through P only (Switch, eq. 4-6; for
          k > 1 and sigmoids DeepSeekMoE, eq. 12, DeepSeek V3, eq. 17).
        - router_z: mean_i (log sum_e exp z_ie)^2, which keeps logits small (ST-MoE, arXiv
          2202.08906, eq. 5)
        """
        routing = self.route(x)
        count = self.options.experts
        shares = (routing.scores / routing.scores.sum(-1, keepdim=True)).reshape(-1, count).mean(0)
        choices = routing.chosen.reshape(-1, count).to(shares).mean(0) / self.options.top_k
        return {
            "balance": count * (choices * shares).sum(),
            "router_z": routing.logits.logsumexp(-1).square().mean(),
        }

    def load(self, x: TokenRows) -> Float[Tensor, " experts"]:
        """The number of tokens that each routed expert gets."""
        return self.route(x).chosen.reshape(-1, self.options.experts).sum(0).float()

    @torch.no_grad()
    def rebalance(self, load: Float[Tensor, " experts"], rate: float) -> None:
        """b_e <- b_e + rate sign(mean load - load_e), once after each update of the weights (Wang
        et al., arXiv 2408.15664, alg. 1).
        """
        self.choice_bias += rate * torch.sign(load.mean() - load).to(self.choice_bias)

    def distance_to_switch(self, x: TokenRows) -> Float[Tensor, "*batch tokens"]:
        """The distance of each token from the nearest one that uses other experts; inf if k = E.

        For b = 0 it is exact in exact arithmetic: min over e in S, e' outside of (z_e - z_e')/|w_e
        - w_e'|, w the rows of W_r. Otherwise it is a lower bound: the gap of the k-th and (k+1)-th
          s + b over sqrt(1/2) |W_r|_2.
        """
        routing = self.route(x)
        if self.options.top_k == self.options.experts:
            return torch.full_like(routing.logits[..., 0], math.inf)
        if self.choice_bias.any():
            ranked = routing.scores + self.choice_bias.to(routing.scores)
            ordered = ranked.sort(-1, descending=True).values
            gap = ordered[..., self.options.top_k - 1] - ordered[..., self.options.top_k]
            return gap / (SCORES_SLOPE * spectral_norm(self.router.weight))
        rows = self.router.weight.double()
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        logits = F.linear(x.double(), rows)
        between = routing.chosen.unsqueeze(-1) & ~routing.chosen.unsqueeze(-2)
        # saturated scores may contradict the order of the logits, then the token is at a switch
        differences = (logits.unsqueeze(-1) - logits.unsqueeze(-2)).clamp_min(0)
        # equal rows never change their order
        gaps = (differences / apart).nan_to_num(nan=math.inf, posinf=math.inf)
        return gaps.masked_fill(~between, math.inf).amin((-2, -1)).to(routing.logits)

    def matrices(self) -> Iterator[Matrix]:
        """W_r, then W_g (if gated), W_1 and W_2 of each expert."""
        yield Matrix(self.router.weight, "router")
        for expert in range(self.options.experts + self.options.shared_experts):
            units = slice(expert * self.hidden, (expert + 1) * self.hidden)
            if self.gate is not None:
                yield Matrix(self.gate.weight[units], "gate")
            yield Matrix(self.up.weight[units], "up")
            yield Matrix(self.down.weight[:, units], "down")

    def bound(self) -> TokenBound:
        """The largest gain, offset and curvature of the routed experts, plus those of the shared
        ones and |b_2|.

        It holds for every router, since gates sum to at most 1.
        """
        bounds = [expert.bound() for expert in self._experts()]
        routed = bounds[: self.options.experts]
        shared = bounds[self.options.experts :]
        gain = max(bound.gain for bound in routed) + sum(bound.gain for bound in shared)
        offset = max(bound.offset for bound in routed) + sum(bound.offset for bound in shared)
        curvature = max(bound.curvature for bound in routed)
        curvature += sum(bound.curvature for bound in shared)
        return TokenBound(gain, offset + length(self.down.bias), curvature)

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """inf, since f jumps where experts change. If every token uses all experts,
        `lipschitz_between_switches`.
        """
        uses_all = self.options.top_k == self.options.experts
        if uses_all:
            return self.lipschitz_between_switches(radius, printed=printed)
        return math.inf

    def lipschitz_between_switches(
        self, radius: float = math.inf, *, printed: bool = False
    ) -> float:
        """max_e L_e + max_e B_e max_e |w_e| + L_shared, a bound on |df/dx| for |x| <= r wherever
        df/dx exists.

        df = sum_e g_e dE_e + sum_e dg_e E_e; sum_e |dg_e| <= max_e |dz_e| for every router (theorem
        4.2 of Emadi for the softmax of z or of log s, abs(d log sigmoid(z)) <= abs(dz)); B_e = max
        |E_e(x)|, E_e = W_2,e h_e, is the expert's bound.
        """
        experts = self._experts()
        count = self.options.experts
        slopes = [expert.lipschitz(radius, printed=printed) for expert in experts]
        row_lengths = torch.linalg.vector_norm(self.router.weight.detach().double(), dim=-1)
        change_of_gates = 0.0
        if count > 1:
            largest_output = max(expert.bound().at(radius) for expert in experts[:count])
            change_of_gates = float(row_lengths.max()) * largest_output
        return max(slopes[:count]) + change_of_gates + sum(slopes[count:])

    @property
    def phi(self) -> Activation:
        """The activation of each expert."""
        return ACTIVATIONS[self.activation]

    def _sorted(self, x: UnbatchedRows) -> UnbatchedRows:
        """f, with each expert applied to its own tokens."""
        options = self.options
        routing = self.route(x)
        # k entries for each token, in the order of its experts; then all entries sorted by expert
        expert_of_entry = routing.chosen.nonzero()[:, 1]
        order = expert_of_entry.argsort(stable=True)
        loads = torch.bincount(expert_of_entry, minlength=options.experts).tolist()
        entries = x.unsqueeze(1).expand(-1, options.top_k, -1).reshape(-1, x.shape[-1])
        tokens_of_expert = entries[order].split(loads)
        experts = self._experts()
        sorted_outputs = [
            F.linear(experts[e].features(tokens_of_expert[e]), experts[e].down.weight)
            for e in range(options.experts)
            if loads[e]
        ]
        outputs = torch.cat(sorted_outputs)[order.argsort()].unflatten(0, (-1, options.top_k))
        gates = routing.gates[routing.chosen].to(outputs.dtype).unflatten(0, (-1, options.top_k))
        y: Tensor = (gates.unsqueeze(-1) * outputs).sum(1)
        if options.shared_experts:
            y = y + F.linear(experts[-1].features(x), experts[-1].down.weight)
        if self.down.bias is None:
            return y
        return y + self.down.bias.to(y.dtype)

    def _experts(self) -> list[FFNMaps]:
        """Each routed expert without its last offset, and all shared ones together at the end."""
        sizes = [self.hidden] * self.options.experts
        if self.options.shared_experts:
            sizes.append(self.hidden * self.options.shared_experts)
        gates: Sequence[Affine | None] = [None] * len(sizes)
        if self.gate is not None:
            gates = _affine(self.gate).split(sizes)
        ups = _affine(self.up).split(sizes)
        downs = self.down.weight.split(sizes, dim=1)
        return [
            FFNMaps(gate, up, Affine(down), self.phi)
            for gate, up, down in zip(gates, ups, downs, strict=True)
        ]


def _affine(linear: nn.Linear) -> Affine:
    return Affine(linear.weight, linear.bias)
