"""Training as optimal control: admissible velocities, Hamiltonian, costate and certificates."""

from ctrans.control.admissible import VERDICTS, AdmissibleSet, GainSlope, Posedness, Supremum
from ctrans.control.attained import Attained, attained
from ctrans.control.certificate import Certificate, certify
from ctrans.control.costate import Costate, costate
from ctrans.control.decay_threshold import DecayThreshold, decay_threshold
from ctrans.control.ellipsoids import Ellipsoid, EllipsoidHull, EllipsoidSlice, ellipsoid_value
from ctrans.control.evidence import Growth, VelocityAscent, WeightAscent, Witness
from ctrans.control.gains import boxed_value, gain_slope
from ctrans.control.last_map import FrobeniusBall, LastMapDecay, gap_of_rank
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.control.regularization import GainDecay, KineticCost
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.step_image import StepImage
from ctrans.control.tangent import TangentSpace, WholeSpace
from solvers import checked

__all__ = [
    "VERDICTS",
    "AdmissibleSet",
    "Attained",
    "Certificate",
    "Costate",
    "DecayThreshold",
    "Ellipsoid",
    "EllipsoidHull",
    "EllipsoidSlice",
    "FrobeniusBall",
    "GainDecay",
    "GainSlope",
    "Growth",
    "KineticCost",
    "LastMapDecay",
    "MaximumPrinciple",
    "Posedness",
    "StepImage",
    "Supremum",
    "TangentSpace",
    "VelocityAscent",
    "WeightAscent",
    "WholeSpace",
    "Witness",
    "admissible_set",
    "attained",
    "boxed_value",
    "certify",
    "costate",
    "decay_threshold",
    "ellipsoid_value",
    "gain_slope",
    "gap_of_rank",
    "maximum_principle",
]

for _function in (
    admissible_set,
    attained,
    boxed_value,
    certify,
    costate,
    decay_threshold,
    ellipsoid_value,
    gain_slope,
    gap_of_rank,
    maximum_principle,
):  # checked where a user calls, and nowhere inside
    globals()[_function.__name__] = checked(_function, face=__name__)
