"""`python -m ctrans` is the command `ctrans`."""

from ctrans.cli import main

main(prog_name="ctrans")
