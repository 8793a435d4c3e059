"""What can be wrong with a model, as one table: what is measured, where it becomes a finding and who says so, what it does, what helps.

A new finding is one entry here, and readings of its quantity by an instrument of the plan (`ctrans.stability.diagnosis.diagnose`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ctrans.stability.diagnosis.quantities import QUANTITIES
from ctrans.stability.diagnosis.remedies import REMEDIES

Severity = Literal["broken", "serious", "note"]
SEVERITIES: tuple[Severity, ...] = ("broken", "serious", "note")
"""Most severe first. Broken: a part computes nothing, something has no finite value, or the loss means nothing. Serious: likely to cost
quality, or to break a training. Note: worth knowing, and often meant so.
"""


@dataclasses.dataclass(frozen=True)
class Ailment:
    """A finding, if a reading of `quantity` lies below `low` or above `high`.

    - `quantity`: which readings it judges; `says` is what that is, as a formula
    - `source`: who set the limit, or that we chose it
    - `does`, `helps`: what it does to the model, and what helps, in plain words
    - `needs`: what a model has to have, or a user to give, for it to be examined at all
    - `near`: by what factor a value inside of the limit counts as close to it; None where there is no such ratio
    - `hides`: ailments that follow from it at the same segment, and are then not said again
    """

    quantity: str
    says: str
    severity: Severity
    source: str
    does: str
    helps: str
    needs: str = ""
    low: float = -math.inf
    high: float = math.inf
    near: float | None = 1.5
    hides: tuple[str, ...] = ()

    def close(self, value: float) -> bool:
        """Whether it is inside by less than the factor `near`, and so not far from a finding."""
        excess = self.excess(value)
        return self.near is not None and math.isfinite(value) and -math.log10(self.near) <= excess <= 0

    def excess(self, value: float) -> float:
        """How far outside of its limits a value is, in powers of ten where limit and value have a ratio; below 0 inside.

        nan, which is not known, counts as inside.
        """
        if math.isnan(value):
            return -math.inf
        beyond = (_decades(self.low, value), _decades(value, self.high))
        return max(beyond)

    @property
    def limit(self) -> str:
        """For a sentence: "below 0.001", "above 1000"."""
        sides = [f"below {self.low:g}"] if self.low > -math.inf else []
        return " or ".join(sides + ([f"above {self.high:g}"] if self.high < math.inf else []))


def _decades(small: float, large: float) -> float:
    """log10(large/small) turned so that it is above 0 where `small` exceeds `large`; a difference where there is no ratio."""
    if math.isinf(small) or math.isinf(large):
        return -math.inf if small < large else math.inf if small > large else 0.0
    if small > 0 and large > 0:
        return math.log10(small) - math.log10(large)
    return math.inf if small > 0 and large == 0 else small - large


OURS = "our choice"
DEAD, TINY_NORM = 1e-3, 1e-3
_DEAD = f"{OURS}: smallest gains of trained models are 0.1 to 1 of the median, and bfloat16 has 3 digits"
_GAIN_SAYS = "least |gamma_i| of a norm over its median |gamma_i|"
_COLLAPSE = QUANTITIES["token similarity"].high
_GUESSING = QUANTITIES["loss over guessing"].high
assert _COLLAPSE is not None, "the screening limits it"
assert _GUESSING is not None, "the screening limits it"

AILMENTS: dict[str, Ailment] = {
    "not finite": Ailment(
        "entries that are not finite",
        "entries of a state, a costate dL/dX or a weight that are inf or nan",
        "broken",
        "any is too many",
        "everything after it is inf or nan too, and no gradient comes back",
        "take a wider dtype, a smaller factor on what sublayers add (here --dt) or smaller weights; "
        "where a weight itself is not finite, an earlier checkpoint",
        high=0.0,
        near=None,
        hides=("huge sensitivity",),
    ),
    "reads ahead": Ailment(
        "change by a later token",
        "what a token's state changes by, beside itself, where the last token alone is another, over the root of the states' precision",
        "broken",
        f"what is to be predicted must not be read; that the root of the precision is more than rounding is {OURS}",
        "a token reads those that it is to predict: the loss falls, and says nothing of how well the model writes, where nothing follows",
        "mask what comes after each token (is_causal=True, or a mask of -inf above the diagonal); nothing in a model that fills in hidden "
        "tokens: choose that loss (here --loss mlm)",
        needs="targets that are the tokens that follow",
        high=1.0,
        near=None,
    ),
    "dead gain around the state": Ailment(
        "gain around the state",
        f"{_GAIN_SAYS}, a norm around the residual sum",
        "broken",
        _DEAD,
        "the channel is the norm's offset whatever the text says, so nothing before it can reach what comes after by that channel. The "
        "ODE divides by this gain: its velocity and costate have no finite value there, while the model's own step has",
        "set the gain to the norm's median and train on briefly, or prune the channel; keep weight decay off gains; read the discrete "
        "model's figures (its costate, its step) and not the ODE's",
        needs="a norm around the residual sum",
        low=DEAD,
    ),
    "dead gain of an output norm": Ailment(
        "gain of an output norm",
        f"{_GAIN_SAYS}, a norm behind attention or FFN",
        "serious",
        _DEAD,
        "the sublayer cannot move that channel by more than the norm's offset",
        "set the gain to the norm's median and train on, or keep weight decay off gains",
        needs="a norm behind attention or FFN",
        low=DEAD,
    ),
    "dead gain of an input norm": Ailment(
        "gain of an input norm",
        f"{_GAIN_SAYS}, a norm before attention or FFN",
        "note",
        _DEAD,
        "the sublayer does not see that channel; models with massive activations learn this on purpose",
        "nothing if that channel holds a massive activation; else keep weight decay off gains",
        needs="a norm before attention or FFN",
        low=DEAD,
    ),
    "dead gain outside the depth": Ailment(
        "gain outside the depth",
        f"{_GAIN_SAYS}, a norm of embedding or head",
        "serious",
        _DEAD,
        "the channel does not pass between the embedding, the blocks and the head",
        "set the gain to the norm's median and train on, or keep weight decay off gains",
        needs="a norm outside the blocks",
        low=DEAD,
    ),
    "dead norm": Ailment(
        "largest gain of a norm",
        "largest |gamma_i| of a norm inside a block",
        "broken",
        f"{OURS}: gains start at 1",
        "all that passes the norm is its offset: the sublayer behind it sees the same whatever the text says, or moves nothing",
        "set its gains back to 1 and train on with a lower learning rate, or drop the sublayer; keep weight decay off gains",
        needs="a norm",
        low=TINY_NORM,
        hides=("no sensitivity", "dead sublayer"),
    ),
    "zero weight": Ailment(
        "largest entry of a matrix",
        "largest |w| of a matrix",
        "serious",
        f"one of zeros computes nothing; that 1e-30 counts as 0 is {OURS}",
        "whatever is read by it is lost; in a product of two matrices of zeros neither gets a gradient",
        "draw it anew and train on, or drop the part. Nothing for last maps of blocks and for adapters, which trainings begin with at 0 on "
        "purpose: their own gradient is not 0; nor for a head, whose own gradient is not 0 either, but the first step moves nothing else",
        needs="matrices, all in memory",
        low=1e-30,
        near=None,
        hides=("no sensitivity", "dead sublayer", "heads of zeros", "unused block", "quiet sublayer"),
    ),
    "heads of zeros": Ailment(
        "heads of zeros",
        "heads whose queries, keys, values or outputs are 0 throughout",
        "serious",
        "any is too many",
        "without queries or keys a head reads all tokens alike, without values or outputs it says nothing",
        "draw that head's weights anew and train on, or prune it; nothing where heads were pruned on purpose",
        needs="attention that shows its heads",
        high=0.0,
        near=None,
    ),
    "outsized gain": Ailment(
        "largest gain over the median",
        "largest |gamma_i| of a norm over its median |gamma_i|",
        "note",
        f"{OURS}: gains of trained models stay within 20 times the median, but for channels of massive activations",
        "one channel outweighs all others in what the sublayer reads, or in what it adds",
        "look whether that channel is meant so; else set the gain to the norm's median, or let gains decay",
        needs="a norm inside the blocks",
        high=50.0,
    ),
    "eps drowns the state": Ailment(
        "eps over mean square",
        "eps over mean((C x)^2), x what a norm divides by its size, median over tokens",
        "serious",
        f"{OURS}: at 1, eps is half of what the norm divides by",
        "the norm hardly normalises: it passes small states on as they are, or next to nothing of them",
        "a smaller eps, or more for the norm to divide: a larger embedding, or before an output norm larger weights of its map",
        needs="a norm with an eps",
        high=1.0,
    ),
    "embedding drowns the depth": Ailment(
        "depth beside a large embedding",
        "the larger of 10 |X_T - Y_T|/|X_T|, Y without any sublayer, in the median over tokens, and 10 over X_0's root mean square",
        "serious",
        f"{OURS}: in trained models the depth makes most of the last state, and embeddings have entries of 0.01 to 3",
        "the state is its embedding from start to end: what attention and FFN add does not count beside it",
        "scale the embedding down (or what multiplies it), or put a norm behind it",
        needs="finite states that are not 0",
        low=1.0,
    ),
    "positions drown the text": Ailment(
        "text in the embedding",
        "share of X_0's variance that is between sequences at the same position",
        "serious",
        f"{OURS}: tables of trained models have 10% to 99%",
        "tokens at one position look alike whatever they say, so that the blocks see positions and hardly a text",
        "scale the table of positions down, or what multiplies the tokens' embedding up",
        needs="two sequences that differ",
        low=1e-3,
    ),
    "loud sublayer": Ailment(
        "move over the neighbours'",
        "what a sublayer adds to the median token, over the most that its neighbours of the same kind add",
        "serious",
        f"{OURS}: neighbours in trained and in fresh models differ by less than 10",
        "one sublayer sets the state, and what the others add does not count beside it",
        "look at the scale of that sublayer's weights; lower them, its learning rate, or put a norm behind it",
        needs="no norm around the state, and blocks that move it",
        high=20.0,
    ),
    "quiet sublayer": Ailment(
        "neighbours' move over its own",
        "the least that a sublayer's neighbours of the same kind add to the median token, over what it adds",
        "note",
        f"{OURS}: neighbours in trained and in fresh models differ by less than 10",
        "it adds next to nothing beside its like, and is nearly left out",
        "look at the scale of that sublayer's weights, or at a number that its output is multiplied with",
        needs="no norm around the state, and at least three blocks, which move it",
        high=20.0,
    ),
    "dead sublayer": Ailment(
        "sensitivity",
        "h |dv/dX|_2 of a sublayer's velocity v over its length h",
        "serious",
        f"a velocity that depends on nothing; that 1e-12 counts as 0 is {OURS}",
        "the sublayer adds the same whatever the text says: its units are all off, or its weights 0, and no gradient passes",
        "look at its offsets and at the gain before it; draw its weights anew and train on, or drop it",
        needs="a Jacobian of each sublayer",
        low=1e-12,
        near=None,
        hides=("no sensitivity",),
    ),
    "huge sensitivity": Ailment(
        "sensitivity",
        "h |dv/dX|_2 of a sublayer's velocity v over its length h: what a small change of the state becomes in one step, beside itself",
        "serious",
        OURS,
        "small changes of the state, rounding too, come out that many times as large, and so do gradients on their way back",
        "mend dead gains first, which cause it behind a norm around the state; else enlarge the embedding or eps where a norm divides by "
        "a small state, lower the factor on what sublayers add (here --dt) or the weights of that sublayer, or clip gradients",
        needs="a Jacobian of each sublayer",
        high=1e3,
    ),
    "no sensitivity": Ailment(
        "sensitivity",
        "h |dv/dX|_2 of a sublayer's velocity v over its length h",
        "note",
        OURS,
        "the sublayer adds next to the same whatever it is given: it neither computes anything of the text nor passes a gradient",
        "larger initial weights or a larger factor on what sublayers add (here --dt); in a trained model the sublayer may be dropped",
        needs="a Jacobian of each sublayer",
        low=1e-5,
    ),
    "saturated heads": Ailment(
        "least entropy of a head",
        "mean over tokens of a row's entropy in nats, of the head where it is least; rows that read one token alone are left out",
        "serious",
        f"{OURS}: at 0.05 nats one token has 99% of the weight. Zhai et al. 2023 saw entropy collapse before trainings diverged",
        "each token reads one other alone: the softmax passes next to no gradient to queries and keys, which then hardly learn",
        REMEDIES["heads saturate"],
        needs="attention that shows the rows of its heads, and two tokens",
        low=QUANTITIES["least entropy"].low or 0.0,
        near=2.0,
    ),
    "massive activation": Ailment(
        "massive activation",
        "the smaller of |x|/100 and |x|/(1000 median |x|), x the largest entry of a state",
        "serious",
        "Sun et al. 2024: above 100, and about 1000 times the median",
        "single entries set the scale of every norm and of every quantised tensor; attention uses their tokens as a sink",
        "quantise with that channel apart or in a wider dtype; for a new training: a norm behind each sublayer, register tokens or "
        "biases in attention that it can rest on",
        needs="finite states",
        high=1.0,
    ),
    "rank collapse": Ailment(
        "token similarity",
        "mean cosine between two tokens of a sequence, by depth",
        "serious",
        f"{OURS}, as in ctrans screen; Dong et al. 2021 have the theory",
        "tokens have become next to one and the same vector, so that no later layer can tell them apart",
        REMEDIES["tokens collapse"],
        needs="finite states",
        high=_COLLAPSE,
        near=None,
    ),
    "unused block": Ailment(
        "block moves",
        "what a block's sublayers do to a token beside the token itself, |x_k+1 - y_k+1|/|x_k+1| with y without them; median over tokens",
        "note",
        OURS,
        "the block could be left out, and the model would say the same",
        "prune it; in a training that begins so: larger initial weights, a larger factor on what sublayers add (here --dt), "
        "or a longer warm-up that lets it start",
        needs="finite states",
        low=1e-4,
    ),
    "decay far below lam*": Ailment(
        "decay over dt lam*",
        "the weight decay given over dt lam*, the penalty of all matrices below which the best velocity is infinite on this text",
        "note",
        f"{OURS}: a factor of 10. dt lam* is exact for attention's values and outputs, and found by ascent for an FFN",
        "no fault: most models are trained so. A decay of this size does not hold the weights in this control problem: growing them pays "
        "more than it costs",
        "a norm behind each sublayer (here --placement peri or output) with decay on its gains, a kinetic cost, or a larger decay; AdamW's "
        "decoupled decay is no penalty in the loss, so take this as an order of magnitude",
        needs="--weight-decay, and a sublayer without a norm behind or around it",
        low=0.1,
        near=None,
    ),
    "grown output norm": Ailment(
        "output gain",
        "root mean square of an output norm's gains, which start at 1",
        "serious",
        f"{OURS}: ten times where they start",
        "velocities and H grow in proportion to these gains: what an output norm should bound runs away by its gains",
        "let gains decay (here ctrans train --decay-gains), or bound them",
        needs="a norm behind attention or FFN",
        high=10.0,
    ),
    "logits adrift": Ailment(
        "log Z",
        "|mean over tokens of log sum_v exp(logit_v) - log V|: 0 for logits of 0 over V tokens",
        "note",
        f"{OURS}: bfloat16 has 8 bits, so logits near 32 are known to 0.1 alone",
        "logits are large, or all are shifted together, which changes no probability: either takes digits from them; where log Z grows "
        "during a training it warns of a divergence",
        "where the loss is above guessing too: a smaller head or embedding; else decay on the head, or a penalty that pulls log Z to 0 "
        "(the z-loss: 1e-4 (log Z)^2 is added to the loss); nothing in a model that is only used in float32",
        needs="a cross-entropy of logits",
        high=30.0,
    ),
    "worse than guessing": Ailment(
        "loss over guessing",
        QUANTITIES["loss over guessing"].says,
        "serious",
        f"{OURS}, as in ctrans screen",
        "the model is sure of wrong tokens: a training begins by unlearning that, with large gradients",
        REMEDIES["starts worse than guessing"],
        needs="a cross-entropy of logits",
        high=_GUESSING,
    ),
    "tied weights that fight": Ailment(
        "cosine of tied gradients",
        "cos of the loss's two gradients in the matrix that embedding and head share, over the rows of tokens in the text",
        "note",
        OURS,
        "a step that helps the embedding harms the head as much, so that the matrix learns slowly",
        "untie them, or scale one of the two (as T5 and Gemma do)",
        needs="a matrix that embedding and head share, and a loss",
        low=-0.5,
        near=None,
    ),
}
"""By name. Within a severity, the one farthest outside of its limits comes first."""
