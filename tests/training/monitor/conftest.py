"""What a monitor could not report is a failure of its tests, and only a warning to a training."""

import logging

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_out(request):
    said = []

    class Listening(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, logger = Listening(logging.WARNING), logging.getLogger("ctrans.training.monitor")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if "reports_may_fail" not in request.fixturenames:
        assert [words for words in said if "no report" in words] == []


@pytest.fixture
def reports_may_fail():
    """For a test of what happens then."""
