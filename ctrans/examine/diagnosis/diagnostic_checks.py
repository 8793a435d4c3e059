"""What `ctrans diagnose` measures, with its checks. A new finding is one entry of `MEASURES`."""

from __future__ import annotations

from ctrans.examine.diagnosis.future_tokens import ReadsAhead
from ctrans.examine.diagnosis.loss_instruments import (
    CostatesByDepth,
    Logits,
    LossOfLess,
    TiedGradients,
)
from ctrans.examine.diagnosis.loss_rivals import DEVIATIONS, LossBesideRivals
from ctrans.examine.diagnosis.norm_instruments import DEAD, OUTLIER, EpsShare, GainsByNorm
from ctrans.examine.diagnosis.state_instruments import (
    BlockMoves,
    EmbeddingShare,
    StatesByDepth,
    SublayerMoves,
)
from ctrans.examine.diagnosis.unit_instruments import (
    LEAST_ENTROPY,
    DeadUnits,
    HeadRows,
    ScoreSpread,
    ZeroHeads,
)
from ctrans.examine.search.limits import LEAST_FALL
from ctrans.measure.findings import OURS, Check, record_of
from ctrans.measure.measures import MEASURES, Measure, checks_of

MOST_SIMILAR = 0.99
"""A limit that the screening shares: of the mean cosine of two tokens."""
WORST_EXCESS = 1.0
"""Another one: of the loss above guessing, in nats."""
LOSS_EXCESS = (
    "the loss on this text minus log V, the loss of equal probabilities, in nats; fresh weights"
    " differ by a few tenths by chance"
)
SATURATED = (
    "Add norms on queries and keys, raise the temperature of the softmax or warm it up (ctrans"
    " train --temperature-start), lower the learning rate, or decay W_Q and W_K. Do nothing if the"
    " model is trained and only used."
)
COLLAPSED = (
    "Add a norm before or behind each sublayer, add less per sublayer (--dt below 1), or use fewer"
    " blocks."
)
GUESSING = (
    "At the start of a training: a smaller head or embedding. For a trained model: compare its head"
    " and embedding with the checkpoint, and its tokenizer and text with those of the training."
)
NOT_PREDICTED = (
    "Compare the head and the embedding with the checkpoint (a new head?), the tokenizer and the"
    " text with those of the training, and the targets with the inputs (shifted once, by one)."
)
_GAIN = "smallest |gamma_i| of a norm over its median |gamma_i|"
_DEAD_SOURCE = (
    f"{OURS}: smallest gains of trained models are 0.1 to 1 of the median, and bfloat16 has 3"
    " digits"
)
_RESET_GAIN = "Set the gain to the norm's median and train on, or keep weight decay off gains."
_JACOBIAN = "h |dv/dX|_2, with the velocity v of a sublayer and its length h (its dt)"
_NEIGHBOURS = f"{OURS}: neighbours in trained and in fresh models differ by less than 10"
MEASURES.add(
    "ctrans diagnose",
    {
        "entries that are not finite": Measure(
            compute=(StatesByDepth, Logits, CostatesByDepth),
            formula="entries of a state, a costate dL/dX or a weight that are inf or nan",
            scope="sublayer",
            checks={
                "not finite": Check(
                    topics=("diagnosis", "weights"),
                    severity="broken",
                    source="no such entry is allowed",
                    impact="All later states are inf or nan too, and gradients are not finite.",
                    remediation=(
                        "Use a wider dtype, add less per sublayer (--dt below 1), or use smaller"
                        " weights. If a weight itself is not finite, go back to an earlier"
                        " checkpoint."
                    ),
                    high=0.0,
                    near=None,
                    suppresses=("sensitivity too large",),
                )
            },
        ),
        "change by a later token": Measure(
            compute=ReadsAhead,
            formula=(
                "relative change of an earlier token's state when a second pass changes only the"
                " last token, over the root of machine epsilon"
            ),
            scope="sublayer",
            checks={
                "reads future tokens": Check(
                    severity="broken",
                    source=(
                        "a model must not read the tokens that it predicts; the limit, the root of"
                        f" machine epsilon, is {OURS}{record_of(2, 2)}"
                    ),
                    impact=(
                        "Tokens read the tokens that they have to predict. The loss falls, and does"
                        " not show how well the model writes."
                    ),
                    remediation=(
                        "Mask later tokens (is_causal=True, or a mask of -inf above the diagonal)."
                        " If there is a mask, check the axis of the softmax, and that heads are"
                        " transposed back before they are joined. Do nothing if the model fills in"
                        " hidden tokens: choose that loss instead (--loss mlm)."
                    ),
                    requires="targets that are the next tokens",
                    high=1.0,
                    near=None,
                )
            },
        ),
        "hidden tokens are a guess": Measure(
            compute=ReadsAhead,
            formula=(
                "1 if tokens of a module also read later ones and no loss is named, so that ctrans"
                " takes it for a model of hidden tokens"
            ),
            scope="sublayer",
            checks={
                "tokens read both ways": Check(
                    severity="serious",
                    source=f"a GPT reads earlier tokens only; {OURS}",
                    impact=(
                        "ctrans takes the model for one that fills in hidden tokens. If it is a"
                        " GPT, its causal mask is missing or has no effect, and this loss is not"
                        " its own."
                    ),
                    remediation=(
                        "For a GPT name its loss, --loss next: the diagnosis then shows the place."
                        " For a model of hidden tokens name --loss mlm: this finding then goes."
                    ),
                    requires="a module that predicts tokens",
                    high=0.0,
                    condition="no loss is named",
                    near=None,
                )
            },
        ),
        "difference of two passes": Measure(
            compute=ReadsAhead,
            formula=(
                "relative difference of a state between two passes of the same text, over the root"
                " of machine epsilon"
            ),
            scope="sublayer",
            checks={
                "not the same twice": Check(
                    severity="serious",
                    source=(
                        "without dropout and noise a model repeats itself; the limit, the root of"
                        f" machine epsilon, is {OURS}{record_of(1, 1)}"
                    ),
                    impact=(
                        "Something draws random numbers, or remembers earlier calls. No loss and no"
                        " figure of this model repeats."
                    ),
                    remediation=(
                        "Switch dropout off in evaluation (model.eval(), and F.dropout's"
                        " training=). Look for hooks and buffers that change a state."
                    ),
                    requires="two passes",
                    high=1.0,
                    near=None,
                )
            },
        ),
        "outlier with a dead gain": Measure(
            compute=GainsByNorm,
            formula=(
                "mean |x_i| of a norm's input in a channel with a dead gain, over the median"
                " channel's"
            ),
            scope="sublayer",
            checks={
                "silenced outlier channel": Check(
                    severity="note",
                    source=(
                        f"{OURS}: {OUTLIER:g} makes an outlier. MiniLM has three such channels of"
                        " 42 to 64"
                    ),
                    impact=(
                        "The model uses the channel inside and hides it from what follows. This is"
                        " no fault."
                    ),
                    remediation=(
                        "Do nothing. Do not reset the gain: in MiniLM that turned the embeddings to"
                        " a cosine of 0.23 to 0.28 with their own."
                    ),
                    requires="a norm before a sublayer or around the residual sum",
                    high=OUTLIER,
                    near=None,
                )
            },
        ),
        "gain around the state": Measure(
            compute=GainsByNorm,
            formula=f"{_GAIN}, for a norm around the residual sum",
            scope="sublayer",
            checks={
                "dead gain around the state": Check(
                    severity="serious",
                    source=_DEAD_SOURCE,
                    impact=(
                        "The channel is the norm's offset for every text, so nothing passes through"
                        " it. The ODE divides by this gain: its velocity and costate have no finite"
                        " value, while the discrete step has one."
                    ),
                    remediation=(
                        "Set the gain to the norm's median and train on briefly, or prune the"
                        " channel. Keep weight decay off gains. Until then read the figures of the"
                        " discrete model, not those of the ODE."
                    ),
                    requires="a norm around the residual sum",
                    low=DEAD,
                )
            },
        ),
        "gain of an output norm": Measure(
            compute=GainsByNorm,
            formula=f"{_GAIN}, for a norm behind attention or FFN",
            scope="sublayer",
            checks={
                "dead gain of an output norm": Check(
                    severity="serious",
                    source=_DEAD_SOURCE,
                    impact="The sublayer moves that channel by the norm's offset at most.",
                    remediation=_RESET_GAIN,
                    requires="a norm behind attention or FFN",
                    low=DEAD,
                )
            },
        ),
        "gain of an input norm": Measure(
            compute=GainsByNorm,
            formula=f"{_GAIN}, for a norm before attention or FFN",
            scope="sublayer",
            checks={
                "dead gain of an input norm": Check(
                    severity="note",
                    source=_DEAD_SOURCE,
                    impact=(
                        "The sublayer does not read that channel. Models with massive activations"
                        " learn this on purpose."
                    ),
                    remediation=(
                        "Do nothing if that channel holds a massive activation. Otherwise keep"
                        " weight decay off gains."
                    ),
                    requires="a norm before attention or FFN",
                    low=DEAD,
                )
            },
        ),
        "gain outside the depth": Measure(
            measured_by="weight_readings",
            formula=f"{_GAIN}, for a norm of the embedding or the head",
            scope="weight",
            checks={
                "dead gain outside the depth": Check(
                    severity="serious",
                    source=_DEAD_SOURCE,
                    impact=(
                        "The channel does not pass between the embedding, the blocks and the head."
                    ),
                    remediation=_RESET_GAIN,
                    requires=(
                        "a norm outside the blocks that is a module with a gain for each channel"
                    ),
                    low=DEAD,
                )
            },
        ),
        "largest gain of a norm": Measure(
            compute=GainsByNorm,
            formula="largest |gamma_i| of a norm inside a block",
            scope="sublayer",
            checks={
                "dead norm": Check(
                    topics=("diagnosis", "weights"),
                    severity="broken",
                    source=f"{OURS}: gains start at 1{record_of(2, 2)}",
                    impact=(
                        "Only the norm's offset passes. The sublayer behind it reads the same for"
                        " every text, or moves nothing."
                    ),
                    remediation=(
                        "Set its gains back to 1 and train on with a lower learning rate, or remove"
                        " the sublayer. Keep weight decay off gains."
                    ),
                    requires="a norm",
                    low=1e-3,
                    suppresses=("sensitivity near zero", "dead sublayer"),
                )
            },
        ),
        "largest entry of a matrix": Measure(
            measured_by="weight_readings",
            formula="largest |w| of a matrix",
            scope="weight",
            checks={
                "zero weight": Check(
                    topics=("diagnosis", "weights"),
                    severity="serious",
                    source=f"a matrix of zeros computes nothing; the limit 1e-30 is {OURS}",
                    impact=(
                        "The matrix's input has no effect. If both matrices of a product are 0,"
                        " neither gets a gradient."
                    ),
                    remediation=(
                        "Draw it again and train on, or remove the part. Do nothing for last maps"
                        " of blocks and for adapters, which trainings start at 0 on purpose, and"
                        " for a head: their own gradient is not 0."
                    ),
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
                )
            },
        ),
        "fall of the loss by an edit": Measure(
            measured_by="the search over edits",
            formula=(
                "the loss minus that with edited weights, inputs or attention, on sequences that"
                " played no part in the choice of the edit"
            ),
            scope="run",
            checks={
                "an edit lowers the loss": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: 0.1 and five standard errors on each half of the sequences,"
                        " beyond the best factor of the outputs. Of healthy models of a trial 0 of"
                        " 4 had such an edit on their own text, and 1 of 20 on other texts"
                    ),
                    impact=(
                        "On this text the model predicts better with the change. If the text is"
                        " like that of its training, it does not compute what its weights were"
                        " trained for."
                    ),
                    remediation=(
                        "Find where the model's code, its checkpoint or its tokenizer differs in"
                        " this from those of the training, and change it there."
                    ),
                    requires="targets, and a search (--search)",
                    high=LEAST_FALL,
                    near=None,
                )
            },
        ),
        "block like random weights": Measure(
            measured_by="weight_readings",
            formula=(
                "largest excess over independent draws of the other blocks (their upper median),"
                " of a block all of whose matrices have less than 1; else 0. The excess of W, m x"
                " n, is the largest of |W|_2 sqrt(m n)/(|W|_F (sqrt m + sqrt n + 4)) and of the"
                " spread of the lengths of rows and of columns, over what draws reach"
            ),
            source=(
                "Davidson & Szarek 2001, theorem II.13; Laurent & Massart 2000, lemma 1: random"
                " matrices have at most 1"
            ),
            scope="weight",
            checks={
                "block untrained": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: at 1.15 blocks that had learned little after 60 steps were named"
                    ),
                    impact=(
                        "This block's matrices have no direction that a training has made larger,"
                        " as if they were just drawn. The blocks around it expect what it has not"
                        " learned."
                    ),
                    remediation=(
                        "Compare the names in the checkpoint with those of the model: what does not"
                        " match is left as drawn (strict=False, missing keys). Do nothing if the"
                        " block was added or drawn anew on purpose."
                    ),
                    requires=(
                        "two matrices in each of several blocks that names number, as h.0, 16 wide"
                        " or more, in memory"
                    ),
                    high=1.5,
                    near=None,
                    topics=("diagnosis", "weights"),
                )
            },
        ),
        "weight like random ones": Measure(
            measured_by="weight_readings",
            formula=(
                "excess over draws, independent ones or torch's even ones, of the matrices of the"
                " same role in other blocks (their upper median), of a matrix that has less than 1;"
                " else 0. Of one outside of the blocks, and like even draws: that of the blocks"
            ),
            source="as of blocks; Kolmogorov's law, for even draws to the edge of torch's layers",
            scope="weight",
            checks={
                "weight untrained": Check(
                    severity="note",
                    source=(
                        f"{OURS}: 21 healthy models after 25 to 1,200 steps of training have up to"
                        " 1.36; of 181 of width 32 after 720 steps 11 have up to 2.12"
                    ),
                    impact=(
                        "This matrix is as if it was just drawn, and those of its role in other"
                        " blocks, or the blocks, were trained. What reads its output expects what"
                        " it has not learned."
                    ),
                    remediation=(
                        "Compare the names in the checkpoint with those of the model: what does not"
                        " match is left as drawn (strict=False, missing keys). If it was there,"
                        " see whether the optimiser had it. Do nothing if it is new on purpose."
                    ),
                    requires=(
                        "three blocks that names number, as h.0, and matrices 16 wide or more, in"
                        " memory"
                    ),
                    high=1.5,
                    near=None,
                    topics=("diagnosis", "weights"),
                )
            },
        ),
        "blocks with equal matrices": Measure(
            measured_by="weight_readings",
            formula="in how many blocks a matrix has the entries of an earlier block's",
            scope="weight",
            checks={
                "blocks with equal weights": Check(
                    severity="note",
                    source=(
                        "matrices that are drawn, or trained, apart are never equal; "
                        "torch's nn.TransformerEncoder copies its layer with its weights"
                    ),
                    impact=(
                        "Blocks begin as copies of one another. They can learn to differ, but the"
                        " initial weights are not those that a recipe means; in a checkpoint a"
                        " block may have been loaded twice."
                    ),
                    remediation=(
                        "Draw the weights of each block again before training (reset_parameters of"
                        " its parts), or compare the blocks with the checkpoint. Do nothing if the"
                        " blocks were copied on purpose, to make a model deeper."
                    ),
                    requires="matrices of several blocks that names number, as h.0, all in memory",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "heads of zeros": Measure(
            compute=ZeroHeads,
            formula="heads whose queries, keys, values or outputs are all 0",
            scope="sublayer",
            checks={
                "heads of zeros": Check(
                    severity="serious",
                    source="no such head is allowed",
                    impact=(
                        "Without queries or keys a head gives all tokens equal weight. Without"
                        " values or outputs it adds nothing."
                    ),
                    remediation=(
                        "Draw that head's weights again and train on, or prune it. Do nothing if"
                        " heads were pruned on purpose."
                    ),
                    requires="attention that exposes its heads",
                    high=0.0,
                    near=None,
                )
            },
        ),
        "largest gain over the median": Measure(
            compute=GainsByNorm,
            formula="largest |gamma_i| of a norm over its median |gamma_i|",
            scope="sublayer",
            checks={
                "gain too large": Check(
                    topics=("diagnosis", "weights"),
                    severity="note",
                    source=(
                        f"{OURS}: gains of trained models stay within 20 times the median, except"
                        " for channels of massive activations"
                    ),
                    impact="One channel dominates the sublayer's input or output.",
                    remediation=(
                        "Check whether the channel is intended. Otherwise set the gain to the"
                        " norm's median, or let gains decay."
                    ),
                    requires="a norm inside the blocks",
                    high=50.0,
                )
            },
        ),
        "eps over mean square": Measure(
            compute=EpsShare,
            formula=(
                "eps of a norm over the mean square of its input (mean subtracted in LayerNorm);"
                " median over tokens"
            ),
            scope="sublayer",
            checks={
                "eps dominates the norm": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: at 1, eps is half of what the norm divides by{record_of(1, 1)}"
                    ),
                    impact="The norm hardly normalises: small states stay small.",
                    remediation=(
                        "Use a smaller eps, or a larger norm input: a larger embedding, or before"
                        " an output norm larger weights of its map."
                    ),
                    requires="a norm with an eps beside the mean square",
                    high=1.0,
                )
            },
        ),
        "depth beside a large embedding": Measure(
            compute=EmbeddingShare,
            formula=(
                "10 |X_T - Y_T|/|X_T|, Y the state without any sublayer (median over tokens), or 10"
                " over X_0's root mean square if larger"
            ),
            scope="run",
            detail=True,
            checks={
                "embedding dominates the depth": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: 11 to 68 in healthy models of the open half of"
                        f" benchmarks/clinic{record_of(3, 1)}"
                    ),
                    impact=(
                        "The state is its embedding from start to end. What attention and FFN add"
                        " is negligible next to it."
                    ),
                    remediation=(
                        "Scale the embedding or its multiplier down until what the blocks add is"
                        " four times as large, or put a norm behind it."
                    ),
                    requires="finite states that are not 0",
                    low=2.0,
                )
            },
        ),
        "text in the embedding": Measure(
            compute=EmbeddingShare,
            formula="share of X_0's variance that is between sequences at the same position",
            scope="run",
            detail=True,
            checks={
                "positions dominate the text": Check(
                    severity="serious",
                    source=f"{OURS}: in trained models it is 10% to 99%{record_of(2, 2)}",
                    impact=(
                        "Tokens at one position are nearly equal in every text, so the blocks read"
                        " positions and almost no text."
                    ),
                    remediation=(
                        "Scale the position table down, or the token embedding's multiplier up."
                    ),
                    requires="two sequences whose first states differ",
                    low=1e-3,
                )
            },
        ),
        "move over the neighbours'": Measure(
            compute=SublayerMoves,
            formula=(
                "what a sublayer adds to the median token, over the most that its neighbours of the"
                " same kind add"
            ),
            scope="sublayer",
            checks={
                "sublayer output too large": Check(
                    severity="serious",
                    source=_NEIGHBOURS,
                    impact=(
                        "One sublayer determines the state, and what the others add is negligible"
                        " next to it."
                    ),
                    remediation=(
                        "Check the scale of that sublayer's weights. Lower them (see ctrans"
                        " diagnose --treat) or their learning rate, or put a norm behind the"
                        " sublayer."
                    ),
                    requires="no norm around the state, and blocks that move it",
                    high=20.0,
                )
            },
        ),
        "neighbours' move over its own": Measure(
            compute=SublayerMoves,
            formula=(
                "the least that a sublayer's neighbours of the same kind add to the median token,"
                " over what it adds"
            ),
            scope="sublayer",
            checks={
                "sublayer output too small": Check(
                    severity="note",
                    source=_NEIGHBOURS,
                    impact=(
                        "It adds almost nothing compared to its neighbours, so the model nearly"
                        " skips it."
                    ),
                    remediation=(
                        "Check the scale of that sublayer's weights, or of a number that multiplies"
                        " its output."
                    ),
                    requires="no norm around the state, and at least three blocks, which move it",
                    high=20.0,
                )
            },
        ),
        "sensitivity": Measure(
            measured_by="Sensitivities",
            formula=_JACOBIAN,
            scope="sublayer",
            checks={
                "dead sublayer": Check(
                    severity="serious",
                    source=f"the velocity does not depend on the state; the limit 1e-12 is {OURS}",
                    impact=(
                        "The sublayer adds the same vector for every text: all its units are off,"
                        " or its weights are 0. No gradient passes."
                    ),
                    remediation=(
                        "Set gains near 0 before it back to 1. Draw matrices of zeros and units"
                        " that are always off again, the units with output weights of 0, and train"
                        " on. Or remove the sublayer."
                    ),
                    requires="a Jacobian of each sublayer",
                    low=1e-12,
                    near=None,
                    suppresses=("sensitivity near zero", "dead units"),
                ),
                "sensitivity too large": Check(
                    severity="serious",
                    source=OURS,
                    impact=(
                        "Small changes of the state, including rounding, grow by that factor."
                        " Gradients grow by it in the backward pass."
                    ),
                    remediation=(
                        "Fix dead gains first, which cause it behind a norm around the state."
                        " Otherwise enlarge the embedding or eps where a norm divides by a small"
                        " state, add less per sublayer (--dt), shrink the weights of that sublayer,"
                        " or clip gradients."
                    ),
                    requires="a Jacobian of each sublayer",
                    high=1e3,
                    description=(
                        f"{_JACOBIAN}: the growth of a small change of the state in one step"
                    ),
                ),
                "sensitivity near zero": Check(
                    severity="note",
                    source=OURS,
                    impact=(
                        "The sublayer adds nearly the same for every input: it computes nothing"
                        " from the text and passes no gradient."
                    ),
                    remediation=(
                        "Use larger initial weights, or add more per sublayer (--dt). In a trained"
                        " model you may remove the sublayer."
                    ),
                    requires="a Jacobian of each sublayer",
                    low=1e-5,
                ),
            },
        ),
        "share of dead units": Measure(
            compute=DeadUnits,
            formula=(
                "share of an FFN's features, before its last map, that are the same for all tokens"
            ),
            scope="sublayer",
            checks={
                "dead units": Check(
                    severity="serious",
                    source=(
                        f"{OURS}: at most 0.052 in the 27 healthy models of the open half of"
                        " benchmarks/clinic"
                    ),
                    impact="Most of the FFN's weights compute nothing, and get no gradient.",
                    remediation=(
                        "Draw their input weights again, set their output weights to 0, and train"
                        " on. The model stays the same at first. Or prune them. At the start of a"
                        " training: a lower learning rate, or smaller biases."
                    ),
                    requires="an FFN with an exposed last map",
                    high=0.8,
                    near=None,
                )
            },
        ),
        "least entropy of a head": Measure(
            key="least entropy",
            compute=HeadRows,
            formula=(
                "mean over tokens of a row's entropy in nats, for the head where it is least; rows"
                " that can read only one token are left out"
            ),
            scope="sublayer",
            checks={
                "saturated heads": Check(
                    topics=("diagnosis", "screening"),
                    verdict="heads saturate",
                    severity="serious",
                    source=(
                        f"{OURS}: at 0.05 nats one token has 99% of the weight. Zhai et al. 2023"
                        " saw entropy collapse before trainings diverged"
                    ),
                    impact=(
                        "Each token reads one other token. The softmax then passes almost no"
                        " gradient to queries and keys, which hardly learn."
                    ),
                    remediation=SATURATED,
                    requires="attention that exposes the rows of its heads, and two tokens",
                    low=LEAST_ENTROPY,
                    near=2.0,
                )
            },
        ),
        "median entropy of a head": Measure(
            compute=HeadRows,
            formula=(
                "mean over tokens of a row's entropy in nats, for the median head of all layers"
            ),
            detail=True,
            checks={
                "most heads saturated": Check(
                    severity="note",
                    source=(
                        f"{OURS}: 1.05 to 2.45 in four healthy models of benchmarks/clinic, 0.07 to"
                        f" 0.4 with scores 30 times as large{record_of(1, 1)}"
                    ),
                    impact="Most heads read one token each. Queries and keys hardly learn.",
                    remediation=(
                        "Compare W_Q, W_K and the temperature with an earlier checkpoint, and load"
                        " these weights again. Do nothing if the heads read a first token as a"
                        " sink."
                    ),
                    requires="attention that exposes the rows of its heads, and two tokens",
                    low=0.5,
                    near=None,
                )
            },
        ),
        "scores over the other layers'": Measure(
            compute=ScoreSpread,
            formula="deviation of a row's attention scores, over the median of the other layers",
            scope="sublayer",
            checks={
                "scores of another scale": Check(
                    severity="note",
                    source=(
                        f"{OURS}: 0.07 to 4.8 in the 27 healthy models of the open half of"
                        " benchmarks/clinic"
                    ),
                    impact=(
                        "Its attention is nearly uniform, or nearly one-hot, and the other layers'"
                        " is not."
                    ),
                    remediation=(
                        "Check the temperature, and the scale of W_Q and W_K. Set them as in the"
                        " other layers, and train on."
                    ),
                    requires="three layers of attention that expose their rows, and three tokens",
                    low=0.03,
                    high=10.0,
                )
            },
        ),
        "massive activation": Measure(
            compute=StatesByDepth,
            formula=(
                "the smaller of |x|/100 and |x|/(1000 median |x|), x the largest entry of a state"
            ),
            scope="state",
            checks={
                "massive activation": Check(
                    severity="serious",
                    source="Sun et al. 2024: above 100, and about 1000 times the median",
                    impact=(
                        "Single entries set the scale of every norm and of every quantised tensor."
                        " Attention uses their tokens as a sink."
                    ),
                    remediation=(
                        "Quantise that channel separately or in a wider dtype. For a new training:"
                        " a norm behind each sublayer, register tokens, or biases in attention that"
                        " can serve as the sink."
                    ),
                    requires="finite states",
                    high=1.0,
                )
            },
        ),
        "token similarity": Measure(
            decimals=3,
            compute=StatesByDepth,
            formula="mean cosine between two tokens of a sequence, by depth",
            scope="state",
            checks={
                "rank collapse": Check(
                    topics=("diagnosis", "screening"),
                    verdict="tokens collapse",
                    severity="serious",
                    source=f"{OURS}, as in ctrans screen; Dong et al. 2021 have the theory",
                    impact=(
                        "All tokens have become nearly the same vector, so later layers cannot tell"
                        " them apart."
                    ),
                    remediation=COLLAPSED,
                    requires="finite states",
                    high=MOST_SIMILAR,
                    near=None,
                )
            },
        ),
        "block moves": Measure(
            compute=BlockMoves,
            formula=(
                "|x_k+1 - y_k+1|/|x_k+1|, y the state without the block's sublayers; median over"
                " tokens"
            ),
            scope="sublayer",
            checks={
                "unused block": Check(
                    severity="note",
                    source=OURS,
                    impact="The model would give the same output without this block.",
                    remediation=(
                        "Prune it. At the start of a training: use larger initial weights, add more"
                        " per sublayer (--dt), or use a longer warm-up."
                    ),
                    requires="finite states",
                    low=1e-4,
                )
            },
        ),
        "decay over dt lam*": Measure(
            measured_by="--weight-decay",
            formula=(
                "the given weight decay over a penalty that is too small (see ctrans hjb-check):"
                " below 1 some weights, however large, gain more than they cost, to first order on"
                " this text"
            ),
            scope="sublayer",
            checks={
                "weight decay below threshold": Check(
                    severity="note",
                    source=(
                        f"{OURS}: a factor of 10. The penalty needed is at least that of the"
                        " present attention rows, and that found by a search for an FFN"
                    ),
                    impact=(
                        "This is no fault: most models are trained this way. A penalty of this size"
                        " in the loss does not bound the weights in the control problem: there are"
                        " weights of any size that gain more than the penalty costs."
                    ),
                    remediation=(
                        "Use a norm behind each sublayer (--placement peri or output) with decay on"
                        " its gains, a kinetic cost, or a larger decay. AdamW's decoupled decay is"
                        " no penalty in the loss, so take this as an order of magnitude."
                    ),
                    requires="--weight-decay, and a sublayer without a norm behind or around it",
                    low=0.1,
                    near=None,
                )
            },
        ),
        "output gain": Measure(
            compute=GainsByNorm,
            formula="root mean square of an output norm's gains, which start at 1",
            scope="sublayer",
            checks={
                "output gains too large": Check(
                    severity="serious",
                    source=f"{OURS}: ten times their initial value",
                    impact=(
                        "Velocities and H grow in proportion to these gains, so the output norm"
                        " does not bound them."
                    ),
                    remediation="Let gains decay (ctrans train --decay-gains), or bound them.",
                    requires="a norm behind attention or FFN",
                    high=10.0,
                )
            },
        ),
        "log Z": Measure(
            compute=Logits,
            formula=(
                "|mean over tokens of log(sum of exp of the logits) - log V|: 0 if all V logits"
                " are 0"
            ),
            scope="run",
            detail=True,
            checks={
                "logits drift": Check(
                    severity="note",
                    source=f"{OURS}: bfloat16 has 8 bits, so logits near 32 have an error of 0.1",
                    impact=(
                        "Logits are large, or all shifted together, which changes no probability."
                        " Both cost digits. If log Z grows during a training, the training may"
                        " diverge."
                    ),
                    remediation=(
                        "If the loss is above guessing too: use a smaller head or embedding."
                        " Otherwise decay the head, or add the z-loss 1e-4 (log Z)^2. Do nothing if"
                        " the model is only used in float32."
                    ),
                    requires="a cross-entropy of logits",
                    high=30.0,
                )
            },
        ),
        "loss over guessing": Measure(
            decimals=3,
            compute=Logits,
            formula=LOSS_EXCESS,
            scope="run",
            detail=True,
            checks={
                "worse than guessing": Check(
                    topics=("diagnosis", "screening"),
                    verdict="starts worse than guessing",
                    is_symptom=True,
                    severity="serious",
                    source=f"{OURS}, as in ctrans screen{record_of(3, 3)}",
                    impact=(
                        "The model gives wrong tokens a high probability. A training must first"
                        " unlearn that, with large gradients."
                    ),
                    remediation=GUESSING,
                    requires="a cross-entropy of logits",
                    high=WORST_EXCESS,
                )
            },
        ),
        "loss on this text": Measure(
            compute=LossBesideRivals,
            formula="the loss on this text, in nats for a cross-entropy",
            scope="run",
        ),
        "loss against shuffled targets": Measure(
            compute=LossBesideRivals,
            formula=(
                "(loss - mean loss for shuffled targets) over its standard deviation: near 0 if"
                " what the model predicts has nothing to do with the targets"
            ),
            scope="run",
            checks={
                "targets are not predicted": Check(
                    is_symptom=True,
                    severity="serious",
                    source="a permutation test: three standard deviations, p = 0.001",
                    impact=(
                        "The predictions fit these targets no better than the same targets in"
                        " another order. If the model was trained, as the unequal gains of its"
                        " norms suggest, a part of it is lost or these are no targets of its text."
                    ),
                    remediation=NOT_PREDICTED,
                    requires=(
                        "a loss of its targets, and norms with gains of their own that are unequal,"
                        " as after a training"
                    ),
                    high=DEVIATIONS,
                    near=None,
                )
            },
        ),
        "loss over counting tokens": Measure(
            compute=LossBesideRivals,
            formula=(
                "loss - mean of -log((c(y) + 1)/(N - 1 + V)), c(y) the count of a target among the"
                " other N - 1"
            ),
            scope="run",
            checks={
                "worse than counting": Check(
                    is_symptom=True,
                    severity="serious",
                    source="a rival that sees no input: how often each token occurs",
                    impact=(
                        "How often each token occurs in this text predicts it better than the"
                        " model, whose norms have unequal gains, as after a training."
                    ),
                    remediation=NOT_PREDICTED,
                    requires=(
                        "a cross-entropy of logits, and norms with gains of their own that are"
                        " unequal, as after a training, and targets that are predicted better than"
                        " in another order"
                    ),
                    high=0.0,
                    near=None,
                )
            },
        ),
        "loss of less of a sublayer": Measure(
            compute=LossOfLess,
            formula=(
                "dL/da in nats: the loss's slope if the sublayer's step is a times as long, at"
                " a = 1"
            ),
            scope="sublayer",
            checks={
                "sublayer raises the loss": Check(
                    severity="note",
                    source=(
                        f"{OURS}: at most 0.36 in the 27 healthy models of the open half of"
                        " benchmarks/clinic"
                    ),
                    impact=(
                        "The loss falls if the sublayer adds less, which a training would have"
                        " found. Its weights, or those before it, are not those that were trained"
                        " together."
                    ),
                    remediation=(
                        "Compare its weights with the checkpoint: names, transposed matrices,"
                        " signs, order of queries, keys and values. Load them again. In an"
                        " untrained model, do nothing."
                    ),
                    requires="a loss",
                    high=1.0,
                    near=None,
                )
            },
        ),
        "cosine of tied gradients": Measure(
            compute=TiedGradients,
            formula=(
                "cos of the loss's two gradients in the matrix that embedding and head share, over"
                " the rows of tokens in the text"
            ),
            scope="weight",
            checks={
                "tied gradients oppose": Check(
                    severity="note",
                    source=OURS,
                    impact=(
                        "A step that helps the embedding harms the head as much, so the matrix"
                        " learns slowly."
                    ),
                    remediation="Untie them, or scale one of the two (as T5 and Gemma do).",
                    requires="a matrix that embedding and head share, and a loss",
                    low=-0.5,
                    near=None,
                )
            },
        ),
    },
    topic="diagnosis",
)
CHECKS = checks_of("diagnosis")
"""The checks by name. Within a severity, the finding farthest outside its limits comes first."""
