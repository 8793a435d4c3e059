"""The sections of the theory: `ctrans verify` and its page name them."""

from __future__ import annotations

SECTIONS: dict[int, str] = {
    1: "dynamics",
    2: "limits",
    3: "norm geometry",
    4: "Hamiltonian",
    5: "costate",
    6: "forward bounds",
    7: "backward sensitivity",
    8: "uncertainty",
    9: "attention sensitivity",
    10: "initialisation",
    11: "reach of training",
    12: "two models",
}
