"""What a user may charge for, so that a Hamiltonian is finite."""

from __future__ import annotations

import dataclasses

from ctrans.control.admissible import check_positive


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What velocities or weights cost: each is lam in lam/2 times a square; or none.

    - `weight_decay`: of all matrices, once in a training loss. No remedy but above the threshold of `DecayThreshold`

    The others are running costs, per unit of depth-time: a penalty lam in a training loss is one of lam/dt.

    - `last_map_decay`: of the last linear map with its bias, what feeds it being fixed
    - `gain_decay`: of an output norm's gains and offsets
    - `kinetic`: of the velocity
    """

    weight_decay: float | None = None
    last_map_decay: float | None = None
    gain_decay: float | None = None
    kinetic: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_positive(name, value)

    @property
    def of_sets(self) -> dict[str, float]:
        """Those that an admissible set takes."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "weight_decay"}
