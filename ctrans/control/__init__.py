"""Training as optimal control: admissible velocities, Hamiltonian, costate, and certificates that the problem is well-posed."""

from ctrans.control.admissible import AdmissibleSet, Verdict
from ctrans.control.bounded_growth import Growth, Witness
from ctrans.control.certificate import Certificate, VelocityAscent, WeightAscent, certify
from ctrans.control.costate import Costate, costate
from ctrans.control.ellipsoids import Ellipsoid, EllipsoidSlice, ellipsoid_value
from ctrans.control.filled_ellipsoid import FilledImage
from ctrans.control.kinetic_cost import KineticCost
from ctrans.control.last_map import FrobeniusBall, WeightDecay
from ctrans.control.linear_spaces import TangentSpace, WholeSpace
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.control.set_of_placement import admissible_set

__all__ = [
    "AdmissibleSet",
    "Certificate",
    "Costate",
    "Ellipsoid",
    "EllipsoidSlice",
    "FilledImage",
    "FrobeniusBall",
    "Growth",
    "KineticCost",
    "MaximumPrinciple",
    "TangentSpace",
    "VelocityAscent",
    "Verdict",
    "WeightAscent",
    "WeightDecay",
    "WholeSpace",
    "Witness",
    "admissible_set",
    "certify",
    "costate",
    "ellipsoid_value",
    "maximum_principle",
]
