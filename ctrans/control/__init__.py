"""Training as optimal control: admissible velocities, Hamiltonian, costate, and certificates that the problem is well-posed."""

from ctrans.control.admissible import AdmissibleSet, Verdict
from ctrans.control.certificate import Certificate, VelocityAscent, WeightAscent, certify
from ctrans.control.cost import KineticCost
from ctrans.control.costate import Costate, costate
from ctrans.control.filled import FilledImage
from ctrans.control.growth import Growth, Witness
from ctrans.control.images import Ellipsoid, EllipsoidSlice, ellipsoid_value
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.control.sets import admissible_set
from ctrans.control.spaces import TangentSpace, WholeSpace
from ctrans.control.weights import FrobeniusBall, WeightDecay

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
