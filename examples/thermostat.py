"""A switched system without Transformers: a room whose heater follows a timetable.

The room loses heat at rate k (T - outside). For some hours a heater adds heat. Each span between
switches is a segment, so a fifth-order method keeps its order. If you give it one field with an
`if` inside, it does not.

python examples/thermostat.py
"""

import math

import torch

from solvers import Segment, solve

LOSS, OUTSIDE, POWER = 0.3, 5.0, 6.0  # per hour, degrees, degrees per hour
TIMETABLE = [
    (0, 6, 0.0),
    (6, 9, POWER),
    (9, 17, 0.0),
    (17, 22, POWER),
    (22, 24, 0.0),
]  # from hour, to hour, heat


def room(heat):
    return lambda t, temperature: heat - LOSS * (temperature - OUTSIDE)


def one_field(t, temperature):
    heat = next(
        heat for start, end, heat in TIMETABLE if start <= t < end or (end == 24 and t >= 24)
    )
    return room(heat)(t, temperature)


exact = 18.0
for start, end, heat in TIMETABLE:
    rest = OUTSIDE + heat / LOSS
    exact = rest + (exact - rest) * math.exp(-LOSS * (end - start))

start = torch.tensor([18.0], dtype=torch.float64)
segments = [Segment(a, b, room(heat)) for a, b, heat in TIMETABLE]
for name, parts in [("switches declared", segments), ("one field", [Segment(0, 24, one_field)])]:
    solution = solve(parts, start, method="tsit5", rtol=1e-6, atol=1e-6)
    error = abs(float(solution.x1) - exact)
    print(
        f"{name:18}: {float(solution.x1):.6f} degrees at midnight, error {error:.1e},"
        f" {solution.stats.evaluations} evaluations"
    )

day = solve(segments, start, method="tsit5", save="segments")
print("  ".join(f"{t:g} h: {float(x):.1f}" for t, x in zip(day.times, day.states, strict=True)))
