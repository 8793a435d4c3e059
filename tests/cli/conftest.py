"""Commands in tests do not say how long they will take: that depends on what else the machine
does.
"""

import math

import pytest

from ctrans.report import progress


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch):
    monkeypatch.setattr(progress, "LONG", math.inf)
