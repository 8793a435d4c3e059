"""What a treatment may use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from benchmarks.clinic.bodies import Parts
from benchmarks.clinic.course import Course
from ctrans.measure.findings import Finding


@dataclasses.dataclass
class Case:
    """What a treatment may use: the course, the finding, and an earlier copy that was healthy as
    far as anyone knew.
    """

    course: Course
    finding: Finding | None = None
    earlier: Course | None = None

    @property
    def blocks(self) -> list[int]:
        """The blocks that the finding names; all of them if it names none."""
        places = [] if self.finding is None else [each.place for each in self.finding.readings]
        named = [int(number) for place in places for number in re.findall(r"block (\d+)", place)]
        return sorted({k for k in named if k < len(self.course.body.blocks)}) or [
            *range(len(self.course.body.blocks))
        ]

    @property
    def parts(self) -> list[Parts]:
        return [self.course.body.blocks[k] for k in self.blocks]

    @property
    def of_attention(self) -> bool:
        return self.finding is not None and "attention" in self.finding.place


Treatment = Callable[[Case], None]
