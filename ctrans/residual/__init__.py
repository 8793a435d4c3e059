"""How a sublayer's output joins the state: the table `RESIDUALS`.

With Y = E X the state as it enters a segment, a sublayer's map gives v = N_out f(s N_in R Y), and
the state moves with dY/dt = r(Y) = W v, W linear: in the discrete model X <- Y + dt W v. A residual
is which E, R, W and s these are; all are the identity, and s = 1, where nothing is said (`plain`).
What follows from W alone: H(P) of the velocities W v is that of v at the pulled costate W'P.

A new residual is one entry: models, commands and tests pick it up from there.
"""

from ctrans.residual.streams import MixesStreams, Streams, sinkhorn
from ctrans.residual.table import ALIASES, RESIDUALS, ResidualEntry, check_image, check_residual, residual_name
from ctrans.residual.velocities import Residual

__all__ = [
    "ALIASES",
    "RESIDUALS",
    "MixesStreams",
    "Residual",
    "ResidualEntry",
    "Streams",
    "check_image",
    "check_residual",
    "residual_name",
    "sinkhorn",
]
