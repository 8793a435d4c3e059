"""The run-time type checker of the tests: beartype, with ints where floats are asked for, as everywhere in Python."""

import functools

from beartype import BeartypeConf, beartype

_CHECKED = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """The function with its arguments and value checked, which is made at its first call: most are never called with checks on."""
    made = None

    @functools.wraps(function)
    def checked(*arguments, **named):
        nonlocal made
        if made is None:
            made = _CHECKED(function)
        return made(*arguments, **named)

    return checked
