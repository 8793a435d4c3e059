"""How a sublayer's output joins the state: the table `RESIDUALS`.

With Y = E X the state on entering a segment, a sublayer's map gives v = N_out f(s N_in R Y), and
the state moves with dY/dt = r(Y) = W v, W linear. The discrete model is X <- Y + dt W v. A residual
defines E, R, W and s. By default (`plain`) all are the identity and s = 1.

It follows from W alone that H(P) of the velocities W v is that of v at the pulled costate W'P. A
new residual is one entry, which models, commands and tests then use.
"""

from ctrans.dynamics.residual.streams import KeptShare, MixesStreams, Streams, sinkhorn
from ctrans.dynamics.residual.table import (
    ALIASES,
    RESIDUALS,
    ResidualEntry,
    check_image,
    check_residual,
    residual_name,
)
from ctrans.dynamics.residual.velocities import Residual

__all__ = [
    "ALIASES",
    "RESIDUALS",
    "KeptShare",
    "MixesStreams",
    "Residual",
    "ResidualEntry",
    "Streams",
    "check_image",
    "check_residual",
    "residual_name",
    "sinkhorn",
]
