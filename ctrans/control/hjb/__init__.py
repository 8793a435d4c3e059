"""The HJB equation in few dimensions: on a grid (`grid`), by the Hopf-Lax formula (`hopf_lax`), and
both compared in the plane (`study`).
"""

from ctrans.control.hjb.grid import (
    SCHEMES,
    Grid,
    Hamiltonian,
    UpwindScheme,
    ValueFunction,
    one_sided,
    solve_hjb,
    speeds,
)

__all__ = [
    "SCHEMES",
    "Grid",
    "Hamiltonian",
    "UpwindScheme",
    "ValueFunction",
    "one_sided",
    "solve_hjb",
    "speeds",
]
