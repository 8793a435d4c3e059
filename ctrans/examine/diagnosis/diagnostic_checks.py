"""The checks of `ctrans diagnose`. A new finding is one entry of `CHECKS`."""

from __future__ import annotations

from ctrans.examine.diagnosis.forward_instruments import DEAD, LEAST_ENTROPY, OUTLIER
from ctrans.examine.diagnosis.instruments import INSTRUMENTS as INSTRUMENTS
from ctrans.examine.diagnosis.instruments import offered
from ctrans.examine.diagnosis.shared_limits import (
    COLLAPSED,
    GUESSING,
    LOSS_EXCESS,
    MOST_SIMILAR,
    SATURATED,
    WORST_EXCESS,
)
from ctrans.measure.findings import OURS, Check, Checks, tried

_GAIN = "smallest |gamma_i| of a norm over its median |gamma_i|"
_DEAD_SOURCE = (
    f"{OURS}: smallest gains of trained models are 0.1 to 1 of the median, and bfloat16 has 3"
    " digits"
)
_RESET_GAIN = "Set the gain to the norm's median and train on, or keep weight decay off gains."
_JACOBIAN = "h |dv/dX|_2, with the velocity v of a sublayer and its length h (its dt)"
_NEIGHBOURS = f"{OURS}: neighbours in trained and in fresh models differ by less than 10"
CHECKS = Checks(
    "diagnosis",
    {
        "not finite": Check(
            "entries that are not finite",
            "entries of a state, a costate dL/dX or a weight that are inf or nan",
            "broken",
            "no such entry is allowed",
            "All later states are inf or nan too, and gradients are not finite.",
            "Use a wider dtype, add less per sublayer (--dt below 1), or use smaller weights. If a"
            " weight itself is not finite, go back to an earlier checkpoint.",
            high=0.0,
            near=None,
            suppresses=("sensitivity too large",),
        ),
        "reads future tokens": Check(
            "change by a later token",
            "relative change of an earlier token's state when a second pass changes only the last"
            " token, over the root of machine epsilon",
            "broken",
            "a model must not read the tokens that it predicts; the limit, the root of machine"
            f" epsilon, is {OURS}{tried(2, 2)}",
            "Tokens read the tokens that they have to predict. The loss falls, and does not show"
            " how well the model writes.",
            "Mask later tokens (is_causal=True, or a mask of -inf above the diagonal). Do nothing"
            " if the model fills in hidden tokens: choose that loss instead (--loss mlm).",
            requires="targets that are the next tokens",
            high=1.0,
            near=None,
        ),
        "not the same twice": Check(
            "difference of two passes",
            "relative difference of a state between two passes of the same text, over the root of"
            " machine epsilon",
            "serious",
            "without dropout and noise a model repeats itself; the limit, the root of machine"
            f" epsilon, is {OURS}{tried(1, 1)}",
            "Something draws random numbers, or remembers earlier calls. No loss and no figure of"
            " this model repeats.",
            "Switch dropout off in evaluation (model.eval(), and F.dropout's training=). Look for"
            " hooks and buffers that change a state.",
            requires="two passes",
            high=1.0,
            near=None,
        ),
        "silenced outlier channel": Check(
            "outlier with a dead gain",
            "mean |x_i| of a norm's input in a channel with a dead gain, over the median channel's",
            "note",
            f"{OURS}: {OUTLIER:g} makes an outlier. MiniLM has three such channels of 42 to 64",
            "The model uses the channel inside and hides it from what follows. This is no fault.",
            "Do nothing. Do not reset the gain: in MiniLM that turned the embeddings to a cosine of"
            " 0.23 to 0.28 with their own.",
            requires="a norm before a sublayer or around the residual sum",
            high=OUTLIER,
            near=None,
        ),
        "dead gain around the state": Check(
            "gain around the state",
            f"{_GAIN}, for a norm around the residual sum",
            "serious",
            _DEAD_SOURCE,
            "The channel is the norm's offset for every text, so nothing passes through it. The ODE"
            " divides by this gain: its velocity and costate have no finite value, while the"
            " discrete step has one.",
            "Set the gain to the norm's median and train on briefly, or prune the channel. Keep"
            " weight decay off gains. Until then read the figures of the discrete model, not those"
            " of the ODE.",
            requires="a norm around the residual sum",
            low=DEAD,
        ),
        "dead gain of an output norm": Check(
            "gain of an output norm",
            f"{_GAIN}, for a norm behind attention or FFN",
            "serious",
            _DEAD_SOURCE,
            "The sublayer moves that channel by the norm's offset at most.",
            _RESET_GAIN,
            requires="a norm behind attention or FFN",
            low=DEAD,
        ),
        "dead gain of an input norm": Check(
            "gain of an input norm",
            f"{_GAIN}, for a norm before attention or FFN",
            "note",
            _DEAD_SOURCE,
            "The sublayer does not read that channel. Models with massive activations learn this on"
            " purpose.",
            "Do nothing if that channel holds a massive activation. Otherwise keep weight decay off"
            " gains.",
            requires="a norm before attention or FFN",
            low=DEAD,
        ),
        "dead gain outside the depth": Check(
            "gain outside the depth",
            f"{_GAIN}, for a norm of the embedding or the head",
            "serious",
            _DEAD_SOURCE,
            "The channel does not pass between the embedding, the blocks and the head.",
            _RESET_GAIN,
            requires="a norm outside the blocks",
            low=DEAD,
        ),
        "dead norm": Check(
            "largest gain of a norm",
            "largest |gamma_i| of a norm inside a block",
            "broken",
            f"{OURS}: gains start at 1{tried(2, 2)}",
            "Only the norm's offset passes. The sublayer behind it reads the same for every text,"
            " or moves nothing.",
            "Set its gains back to 1 and train on with a lower learning rate, or remove the"
            " sublayer. Keep weight decay off gains.",
            requires="a norm",
            low=1e-3,
            suppresses=("sensitivity near zero", "dead sublayer"),
        ),
        "zero weight": Check(
            "largest entry of a matrix",
            "largest |w| of a matrix",
            "serious",
            f"a matrix of zeros computes nothing; the limit 1e-30 is {OURS}",
            "The matrix's input has no effect. If both matrices of a product are 0, neither gets a"
            " gradient.",
            "Draw it again and train on, or remove the part. Do nothing for last maps of blocks and"
            " for adapters, which trainings start at 0 on purpose, and for a head: their own"
            " gradient is not 0.",
            requires="matrices, all in memory",
            low=1e-30,
            near=None,
            suppresses=(
                "sensitivity near zero",
                "dead sublayer",
                "heads of zeros",
                "unused block",
                "sublayer output too small",
            ),
        ),
        "heads of zeros": Check(
            "heads of zeros",
            "heads whose queries, keys, values or outputs are all 0",
            "serious",
            "no such head is allowed",
            "Without queries or keys a head gives all tokens equal weight. Without values or"
            " outputs it adds nothing.",
            "Draw that head's weights again and train on, or prune it. Do nothing if heads were"
            " pruned on purpose.",
            requires="attention that exposes its heads",
            high=0.0,
            near=None,
        ),
        "gain too large": Check(
            "largest gain over the median",
            "largest |gamma_i| of a norm over its median |gamma_i|",
            "note",
            f"{OURS}: gains of trained models stay within 20 times the median, except for channels"
            " of massive activations",
            "One channel dominates the sublayer's input or output.",
            "Check whether the channel is intended. Otherwise set the gain to the norm's median, or"
            " let gains decay.",
            requires="a norm inside the blocks",
            high=50.0,
        ),
        "eps dominates the norm": Check(
            "eps over mean square",
            "eps of a norm over the mean square of its input (mean subtracted in LayerNorm); median"
            " over tokens",
            "serious",
            f"{OURS}: at 1, eps is half of what the norm divides by{tried(1, 1)}",
            "The norm hardly normalises: small states stay small.",
            "Use a smaller eps, or a larger norm input: a larger embedding, or before an output"
            " norm larger weights of its map.",
            requires="a norm with an eps",
            high=1.0,
        ),
        "embedding dominates the depth": Check(
            "depth beside a large embedding",
            "10 |X_T - Y_T|/|X_T|, Y the state without any sublayer (median over tokens), or 10"
            " over X_0's root mean square if larger",
            "serious",
            f"{OURS}: 11 to 68 in healthy models of the open half of"
            f" benchmarks/clinic{tried(3, 1)}",
            "The state is its embedding from start to end. What attention and FFN add is negligible"
            " next to it.",
            "Scale the embedding or its multiplier down until what the blocks add is four times as"
            " large, or put a norm behind it.",
            requires="finite states that are not 0",
            low=2.0,
        ),
        "positions dominate the text": Check(
            "text in the embedding",
            "share of X_0's variance that is between sequences at the same position",
            "serious",
            f"{OURS}: in trained models it is 10% to 99%{tried(2, 2)}",
            "Tokens at one position are nearly equal in every text, so the blocks read positions"
            " and almost no text.",
            "Scale the position table down, or the token embedding's multiplier up.",
            requires="two sequences that differ",
            low=1e-3,
        ),
        "sublayer output too large": Check(
            "move over the neighbours'",
            "what a sublayer adds to the median token, over the most that its neighbours of the"
            " same kind add",
            "serious",
            _NEIGHBOURS,
            "One sublayer determines the state, and what the others add is negligible next to it.",
            "Check the scale of that sublayer's weights. Lower them (see ctrans diagnose --treat)"
            " or their learning rate, or put a norm behind the sublayer.",
            requires="no norm around the state, and blocks that move it",
            high=20.0,
        ),
        "sublayer output too small": Check(
            "neighbours' move over its own",
            "the least that a sublayer's neighbours of the same kind add to the median token, over"
            " what it adds",
            "note",
            _NEIGHBOURS,
            "It adds almost nothing compared to its neighbours, so the model nearly skips it.",
            "Check the scale of that sublayer's weights, or of a number that multiplies its"
            " output.",
            requires="no norm around the state, and at least three blocks, which move it",
            high=20.0,
        ),
        "dead sublayer": Check(
            "sensitivity",
            _JACOBIAN,
            "serious",
            f"the velocity does not depend on the state; the limit 1e-12 is {OURS}",
            "The sublayer adds the same vector for every text: all its units are off, or its"
            " weights are 0. No gradient passes.",
            "Set gains near 0 before it back to 1. Draw matrices of zeros and units that are always"
            " off again, the units with output weights of 0, and train on. Or remove the sublayer.",
            requires="a Jacobian of each sublayer",
            low=1e-12,
            near=None,
            suppresses=("sensitivity near zero", "dead units"),
        ),
        "dead units": Check(
            "share of dead units",
            "share of an FFN's features, before its last map, that are the same for all tokens",
            "serious",
            f"{OURS}: at most 0.052 in the 27 healthy models of the open half of benchmarks/clinic",
            "Most of the FFN's weights compute nothing, and get no gradient.",
            "Draw their input weights again, set their output weights to 0, and train on. The model"
            " stays the same at first. Or prune them. At the start of a training: a lower learning"
            " rate, or smaller biases.",
            requires="an FFN with an exposed last map",
            high=0.8,
            near=None,
        ),
        "sensitivity too large": Check(
            "sensitivity",
            f"{_JACOBIAN}: the growth of a small change of the state in one step",
            "serious",
            OURS,
            "Small changes of the state, including rounding, grow by that factor. Gradients grow by"
            " it in the backward pass.",
            "Fix dead gains first, which cause it behind a norm around the state. Otherwise enlarge"
            " the embedding or eps where a norm divides by a small state, add less per sublayer"
            " (--dt), shrink the weights of that sublayer, or clip gradients.",
            requires="a Jacobian of each sublayer",
            high=1e3,
        ),
        "sensitivity near zero": Check(
            "sensitivity",
            _JACOBIAN,
            "note",
            OURS,
            "The sublayer adds nearly the same for every input: it computes nothing from the text"
            " and passes no gradient.",
            "Use larger initial weights, or add more per sublayer (--dt). In a trained model you"
            " may remove the sublayer.",
            requires="a Jacobian of each sublayer",
            low=1e-5,
        ),
        "saturated heads": Check(
            "least entropy of a head",
            "mean over tokens of a row's entropy in nats, for the head where it is least; rows that"
            " can read only one token are left out",
            "serious",
            f"{OURS}: at 0.05 nats one token has 99% of the weight. Zhai et al. 2023 saw entropy"
            " collapse before trainings diverged",
            "Each token reads one other token. The softmax then passes almost no gradient to"
            " queries and keys, which hardly learn.",
            SATURATED,
            requires="attention that exposes the rows of its heads, and two tokens",
            low=LEAST_ENTROPY,
            near=2.0,
        ),
        "most heads saturated": Check(
            "median entropy of a head",
            "mean over tokens of a row's entropy in nats, for the median head of all layers",
            "note",
            f"{OURS}: 1.05 to 2.45 in four healthy models of benchmarks/clinic, 0.07 to 0.4 with"
            f" scores 30 times as large{tried(1, 1)}",
            "Most heads read one token each. Queries and keys hardly learn.",
            "Compare W_Q, W_K and the temperature with an earlier checkpoint, and load these"
            " weights again. Do nothing if the heads read a first token as a sink.",
            requires="attention that exposes the rows of its heads, and two tokens",
            low=0.5,
            near=None,
        ),
        "scores of another scale": Check(
            "scores over the other layers'",
            "deviation of a row's attention scores, over the median of the other layers",
            "note",
            f"{OURS}: 0.07 to 4.8 in the 27 healthy models of the open half of benchmarks/clinic",
            "Its attention is nearly uniform, or nearly one-hot, and the other layers' is not.",
            "Check the temperature, and the scale of W_Q and W_K. Set them as in the other layers,"
            " and train on.",
            requires="three layers of attention that expose their rows, and three tokens",
            low=0.03,
            high=10.0,
        ),
        "massive activation": Check(
            "massive activation",
            "the smaller of |x|/100 and |x|/(1000 median |x|), x the largest entry of a state",
            "serious",
            "Sun et al. 2024: above 100, and about 1000 times the median",
            "Single entries set the scale of every norm and of every quantised tensor. Attention"
            " uses their tokens as a sink.",
            "Quantise that channel separately or in a wider dtype. For a new training: a norm"
            " behind each sublayer, register tokens, or biases in attention that can serve as the"
            " sink.",
            requires="finite states",
            high=1.0,
        ),
        "rank collapse": Check(
            "token similarity",
            "mean cosine between two tokens of a sequence, by depth",
            "serious",
            f"{OURS}, as in ctrans screen; Dong et al. 2021 have the theory",
            "All tokens have become nearly the same vector, so later layers cannot tell them"
            " apart.",
            COLLAPSED,
            requires="finite states",
            high=MOST_SIMILAR,
            near=None,
        ),
        "unused block": Check(
            "block moves",
            "|x_k+1 - y_k+1|/|x_k+1|, y the state without the block's sublayers; median over"
            " tokens",
            "note",
            OURS,
            "The model would give the same output without this block.",
            "Prune it. At the start of a training: use larger initial weights, add more per"
            " sublayer (--dt), or use a longer warm-up.",
            requires="finite states",
            low=1e-4,
        ),
        "weight decay below threshold": Check(
            "decay over dt lam*",
            "the given weight decay over the penalty needed (see ctrans hjb-check): with a smaller"
            " one, larger weights are always better on this text",
            "note",
            f"{OURS}: a factor of 10. The penalty needed is exact for attention's values and"
            " outputs, and found by a search for an FFN",
            "This is no fault: most models are trained this way. A decay of this size does not"
            " bound the weights in the control problem: larger weights gain more than the decay"
            " costs.",
            "Use a norm behind each sublayer (--placement peri or output) with decay on its gains,"
            " a kinetic cost, or a larger decay. AdamW's decoupled decay is no penalty in the loss,"
            " so take this as an order of magnitude.",
            requires="--weight-decay, and a sublayer without a norm behind or around it",
            low=0.1,
            near=None,
        ),
        "output gains too large": Check(
            "output gain",
            "root mean square of an output norm's gains, which start at 1",
            "serious",
            f"{OURS}: ten times their initial value",
            "Velocities and H grow in proportion to these gains, so the output norm does not bound"
            " them.",
            "Let gains decay (ctrans train --decay-gains), or bound them.",
            requires="a norm behind attention or FFN",
            high=10.0,
        ),
        "logits drift": Check(
            "log Z",
            "|mean over tokens of log(sum of exp of the logits) - log V|: 0 if all V logits are 0",
            "note",
            f"{OURS}: bfloat16 has 8 bits, so logits near 32 have an error of 0.1",
            "Logits are large, or all shifted together, which changes no probability. Both cost"
            " digits. If log Z grows during a training, the training may diverge.",
            "If the loss is above guessing too: use a smaller head or embedding. Otherwise decay"
            " the head, or add the z-loss 1e-4 (log Z)^2. Do nothing if the model is only used in"
            " float32.",
            requires="a cross-entropy of logits",
            high=30.0,
        ),
        "worse than guessing": Check(
            "loss over guessing",
            LOSS_EXCESS,
            "serious",
            f"{OURS}, as in ctrans screen{tried(3, 3)}",
            "The model gives wrong tokens a high probability. A training must first unlearn that,"
            " with large gradients.",
            GUESSING,
            requires="a cross-entropy of logits",
            high=WORST_EXCESS,
        ),
        "sublayer raises the loss": Check(
            "loss of less of a sublayer",
            "dL/da in nats: the loss's slope if the sublayer's step is a times as long, at a = 1",
            "note",
            f"{OURS}: at most 0.36 in the 27 healthy models of the open half of benchmarks/clinic",
            "The loss falls if the sublayer adds less, which a training would have found. Its"
            " weights, or those before it, are not those that were trained together.",
            "Compare its weights with the checkpoint: names, transposed matrices, signs, order of"
            " queries, keys and values. Load them again. In an untrained model, do nothing.",
            requires="a loss",
            high=1.0,
            near=None,
        ),
        "tied gradients oppose": Check(
            "cosine of tied gradients",
            "cos of the loss's two gradients in the matrix that embedding and head share, over the"
            " rows of tokens in the text",
            "note",
            OURS,
            "A step that helps the embedding harms the head as much, so the matrix learns slowly.",
            "Untie them, or scale one of the two (as T5 and Gemma do).",
            requires="a matrix that embedding and head share, and a loss",
            low=-0.5,
            near=None,
        ),
    },
    offered,
)
"""The checks by name. Within a severity, the finding farthest outside its limits comes first."""
