"""The ball of velocities: the image of clipping a token's length. It is compact, so a velocity
attains H.
"""

from __future__ import annotations

import math

from ctrans.base.shapes import TokenRows, UnbatchedRows
from ctrans.control.admissible import length
from ctrans.control.ascent import Map
from ctrans.control.norm_image import NormImage
from ctrans.dynamics.norm import ClipLength


class Ball(NormImage):
    """{f : |f_j| <= c sqrt(d)}: H(P) = c sqrt(d) sum_j |p_j|, attained at -c sqrt(d) p_j/|p_j|; if
    p_j = 0 all points tie.
    """

    norm: ClipLength

    @property
    def radius(self) -> float:
        """c sqrt(d)."""
        return self.norm.radius * math.sqrt(self.norm.width)

    @property
    def words(self) -> str:
        return f"|f_j| <= {self.radius:g}"

    @property
    def inside(self) -> Map:
        """The norm itself: outside the ball it has no slope along the input, so an ascent would not
        leave a costly velocity.
        """
        return self.norm

    @property
    def spread(self) -> float:
        return self.norm.radius

    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        return f

    def nearest(self, y: TokenRows) -> TokenRows:
        return y / (length(y).unsqueeze(-1) / self.radius).clamp_min(1)
