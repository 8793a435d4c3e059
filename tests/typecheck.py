"""The run-time type checker of the tests: beartype, with ints where floats are asked for, as everywhere in Python."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
