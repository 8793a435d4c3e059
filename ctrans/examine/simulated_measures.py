"""The measures of `ctrans simulate`: the figures along the depth, the Euler limit, the action, and
those of two optional analyses: exponents of tokens, and what each sublayer contributes.
"""

from __future__ import annotations

from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.state_measures import root_mean_square as root_mean_square  # and its entries

ROUNDING = 1e-9
"""A share of a bound above 1 by less than this is rounding."""
_SHARE = "mean |x| over its bound. Above 100% the method takes too few steps"
_CONSERVED = "departure from what this placement conserves"
_APART = (
    "|X_discrete - X_ODE| / |X_ODE|, of the Transformer and its ODE. The Transformer takes an Euler"
    " step a sublayer. The distance is no error of the model: it measures how well a continuous"
    " depth describes it"
)
_SIZE = "mean |x| over the state's entries"

_LIMIT = "The Euler limit"
MEASURES.add(
    "ctrans.simulate",
    {
        "solved to the end": Measure(
            formula="whether the solution reached the end of the depth", detail=True
        ),
        "size at the start": Measure(formula=_SIZE, unit="mean |x|"),
        "size at the end": Measure(formula=_SIZE, unit="mean |x|"),
        "largest share of the bound": Measure(
            formula=_SHARE, title="share of the bound", share=True, marked=1 + ROUNDING
        ),
        "largest conservation error": Measure(formula=_CONSERVED, title="conservation error"),
        "distance to the ODE at the end": Measure(
            formula="|X_discrete - X_ODE| / |X_ODE| at the end of the depth",
            title="distance to the ODE",
        ),
        "evaluations": Measure(formula="evaluations of a velocity", detail=True),
        "accepted steps": Measure(formula="steps of the method that were accepted", detail=True),
        "rejected steps": Measure(formula="steps of the method that were rejected", detail=True),
        "bound": Measure(
            formula="the most that theory allows mean |x| to be",
            unit="mean |x|",
            scope="state",
            source="Kan, theorems of section 4, sharpened (THEORY.md, section 6)",
            bounds="mean_abs",
        ),
        "paper's bound": Measure(
            formula="bound on mean |x| as the paper prints it",
            unit="mean |x|",
            scope="state",
            source="Kan, section 4",
            detail=True,
        ),
        "bound of the variance": Measure(
            formula="the most that theory allows the variance to be",
            unit="variance",
            scope="state",
            source="THEORY.md, section 6",
            bounds="variance",
        ),
        "paper's bound of the variance": Measure(
            formula="bound on the variance as the paper prints it",
            unit="variance",
            scope="state",
            source="Kan, section 4",
            detail=True,
        ),
        "bound of the root mean square": Measure(
            formula="the most that theory allows the root mean square to be",
            unit="|X_k|/sqrt(number of entries)",
            scope="state",
            source="THEORY.md, section 6",
            bounds="rms",
            detail=True,
        ),
        "share of the bound": Measure(
            formula=_SHARE, unit="share", scope="state", share=True, detail=True
        ),
        "conservation error": Measure(formula=_CONSERVED, scope="state", detail=True),
        "distance to the ODE": Measure(
            formula=_APART,
            title="the discrete model and its ODE",
            unit="|X_discrete − X_ODE| / |X_ODE|",
            scope="state",
        ),
        "error of the method": Measure(
            formula="relative distance of the chosen method's solution from the ODE's",
            unit="|X − X_ODE| / |X_ODE|",
            scope="state",
            detail=True,
        ),
    },
)
MEASURES.add(
    "ctrans.simulate",
    {
        "slope of the Euler limit": Measure(
            formula=(
                "p of error ~ n^-p (1 + c/n), n Euler steps a sublayer: a fit to the last four n"
                " (three if there are no more). In theory 1"
            ),
            title="slope",
            decimals=2,
            topic=_LIMIT,
            source="THEORY.md, section 2",
            detail=True,
        ),
        "error of the discrete model": Measure(
            formula="|X_1 - X_ODE|/|X_ODE| at the end of the depth, n = 1",
            title="error at n = 1",
            topic=_LIMIT,
            detail=True,
        ),
        "error of more Euler steps": Measure(
            formula=(
                "|X_n - X_ODE|/|X_ODE| at the end of the depth, n Euler steps a sublayer. n = 1 is"
                " the model's own step: with a norm around the state Euler and then the norm, while"
                " the others are Euler steps of the ODE on the norm's image. Dashes: slope -1, an"
                " error proportional to 1/n"
            ),
            title="more Euler steps tend to the ODE",
            unit="|X_n − X_ODE| / |X_ODE|",
            scope="size",
            over="Euler steps a sublayer, n",
            log_x=True,
            slope=-1.0,
        ),
    },
)
_ACTION = "Action and straightness"
_BRENIER = "Benamou and Brenier, Numer. Math. 84 (2000)"
MEASURES.add(
    "ctrans.simulate",
    {
        "straightness": Measure(
            formula=(
                "mean |X_T - X_0|^2 over the mean action. 1 if all tokens move straight at constant"
                " speed"
            ),
            decimals=3,
            topic=_ACTION,
            source=_BRENIER,
            detail=True,
        ),
        "action": Measure(
            formula=(
                "T sum_k |X_(k+1) - X_k|^2/h_k, mean over tokens: T int |v|^2 dt of the discrete"
                " model. A norm around the state moves it too, and that move counts"
            ),
            unit="squared length",
            topic=_ACTION,
            source=_BRENIER,
            detail=True,
        ),
        "squared displacement": Measure(
            formula="|X_T - X_0|^2, mean over tokens: at most the action (Cauchy-Schwarz)",
            unit="squared length",
            topic=_ACTION,
            detail=True,
        ),
        "W_2^2 of the tokens": Measure(
            formula=(
                "min over permutations s of the mean of |X_T[s(i)] - X_0[i]|^2 over tokens i: the"
                " least action that takes the same tokens to the same places, whichever goes where"
            ),
            title="W_2^2",
            unit="squared length",
            topic=_ACTION,
            source=_BRENIER,
            detail=True,
        ),
        "opposed sublayers": Measure(
            formula=(
                "cos(dX_j, dX_k), over all tokens, of the two sublayers whose displacements"
                " dX_k = X_(k+1) - X_k have the most negative product"
            ),
            decimals=2,
            topic=_ACTION,
            detail=True,
        ),
        "least straightness of a token": Measure(
            formula="|X_T - X_0|^2 over the action, of the token where it is least",
            decimals=3,
            topic=_ACTION,
            detail=True,
        ),
        "share of the displacement": Measure(
            formula=(
                "<X_(k+1) - X_k, X_T - X_0>/|X_T - X_0|^2, with sums over tokens: the shares of all"
                " sublayers sum to 1. A sublayer below 0 undoes what the others do"
            ),
            title="share of the displacement by sublayer",
            unit="share of |X_T − X_0|²",
            scope="sublayer",
            share=True,
            log=False,
        ),
    },
)
MEASURES.add(
    "ctrans simulate --lyapunov",
    {
        "token exponent": Measure(
            formula=(
                "log|dX_T[last]/dX_0[j]|/T of each input token j. Red: a small change of the token"
                " grows on its way to the last token's state. Blue: it decays. Grey: it does not"
                " get there"
            ),
            title="growth rate of a small change of each input token",
            unit="1/depth-time",
            scope="token",
        ),
    },
)
_PARTS = "embedding, sublayers in order, offsets"
MEASURES.add(
    "ctrans simulate --contributions",
    {
        "share of the last state": Measure(
            formula="<part, X>/|X|^2, mean over tokens: the shares sum to 1",
            scope="size",
            over=_PARTS,
            log=False,
            drawn="bars",
        ),
        "size of a part": Measure(
            formula="|part|/|X|, relative to the last state", scope="size", over=_PARTS, detail=True
        ),
        "added to the target's logit": Measure(
            formula="of the target, less the mean logit: the parts sum to it",
            scope="size",
            over=_PARTS,
            log=False,
            drawn="bars",
        ),
    },
    picture="contributions",
)
