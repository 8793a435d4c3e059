"""Tests, by the room that they check. How threads wait is set before any of them imports torch."""

from ctrans.base.threads import wait_passively

wait_passively()
