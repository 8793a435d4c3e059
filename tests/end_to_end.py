"""The tests of `make test` that may take over 0.3 seconds."""

END_TO_END = ()
