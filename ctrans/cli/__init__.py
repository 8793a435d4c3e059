"""The command `ctrans`. A subcommand's module, and with it torch, is imported when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ctrans import __version__
from ctrans.base.old_names import REMOVED_COMMANDS
from ctrans.base.pages import take_huge_pages
from ctrans.base.threads import wait_passively
from ctrans.cli.exits import Terminated
from ctrans.cli.other_warnings import other_warnings
from ctrans.cli.say import discard_stdout, end_stdout, naming_stdout, say, say_last
from ctrans.cli.signals import ending_by_signals, signal_seen, words_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

wait_passively()
take_huge_pages()

COMMANDS = {
    "simulate": "Run text through a GPT and show how hidden states move through depth.",
    "hjb-check": (
        "Certify for each sublayer whether its Hamiltonian is finite, and under which bounds."
    ),
    "diagnose": (
        "List what is unusual in a model, most severe first: place, figure, and what may help."
    ),
    "screen": (
        "Screen an architecture before you train it: each figure has a lower and an upper limit."
    ),
    "compare": "Say where two models part, part by part, and whether rounding explains it.",
    "verify": "Check every statement of the theory on random cases, as printed and as corrected.",
    "train": "Train a GPT, through its ODE or as the discrete Transformer.",
    "coordinate-check": "Check whether a learning rate transfers to other widths and depths.",
    "export": "Write a trained model in the format of Hugging Face or nanoGPT.",
    "watch": "Show a monitored training: progress, figures by depth, alarms.",
    "generate": "Continue a text with a trained model.",
    "study": "Run many trainings, keep them in one file, and compare their results.",
    "report": "Put JSON results side by side on one page.",
}


OLD_COMMANDS = {
    "control": "ctrans hjb-check --principle",
    "convergence": "ctrans simulate --orders all",
}
"""Commands of version 0.3 that are parts of another one now. They work until version 0.5."""


class Commands(click.Group):
    """A group that imports a command when it is called, and turns every failure into one line and
    an exit code (`explained`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in REMOVED_COMMANDS:
            ctx.fail(f"ctrans {cmd_name} was removed: use {REMOVED_COMMANDS[cmd_name]}")
        if cmd_name not in COMMANDS and cmd_name not in OLD_COMMANDS:
            import difflib

            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            if near:
                hint = f": did you mean {near[0]!r}?"
            else:
                hint = f". There are {', '.join(COMMANDS)}"
            ctx.fail(f"No such command {cmd_name!r}{hint}")
        name = f"ctrans.cli.{cmd_name.replace('-', '_')}"
        is_new = name not in sys.modules
        gc.disable()  # of what an import makes nothing is garbage
        try:
            # before memory or descriptors may run out
            importlib.import_module("ctrans.cli.failures")
            command: click.Command = importlib.import_module(name).command
        finally:
            if is_new:
                gc.freeze()  # no later collection looks at modules: a tenth of a short command
            gc.enable()
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands with this beginning, without importing them, and options of the group."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=says)
            for name, says in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            os.getcwd()
        except OSError:  # where MKL ends the process
            raise click.UsageError("the current directory is gone: change to another one") from None
        try:
            result = super().invoke(ctx)
            with naming_stdout():
                sys.stdout.flush()
            if ctx.invoked_subcommand in OLD_COMMANDS:
                new = OLD_COMMANDS[ctx.invoked_subcommand]
                say(f"{ctx.invoked_subcommand} is now a part of {new}", error=True)
            return result
        except (BrokenPipeError, SystemExit) as error:
            # rich exits where nobody reads
            nobody_reads = isinstance(error, BrokenPipeError) or isinstance(
                error.__context__, BrokenPipeError
            )
            if not nobody_reads:
                raise
            discard_stdout()
            ctx.exit(128 + signal.SIGPIPE)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("COLUMNS") == "0":  # rich would print nothing
            del os.environ["COLUMNS"]
        # pictures are files; a name that matplotlib does not know would end its import
        os.environ.pop("MPLBACKEND", None)
        if sys.stdout is None:  # closed; a file that is opened later would get its number
            sys.stdout = open(os.devnull, encoding="utf-8")  # noqa: SIM115 for all of the process; writes raise OSError
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 for all of the process
        for stream in (sys.stdout, sys.stderr):  # file names may be bytes that are no text
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        is_own_process = not args and "args" not in kwargs
        stdout = sys.stdout
        try:
            with other_warnings(is_own_process=is_own_process), ending_by_signals():
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except BaseException as error:  # users' code may raise any class
            if isinstance(error, SystemExit) and sys.stdout is not stdout:
                sys.exit(128 + signal.SIGPIPE)  # click replaces it where nobody reads the help
            message, code = _ending_of(error)
            say_last(message)
        finally:
            if is_own_process:  # first of all that runs at its exit
                atexit.register(end_stdout)
                gc.freeze()  # the end looks for no garbage among the objects of torch
        sys.exit(code if isinstance(code, int) else 0)


def _ending_of(error: BaseException) -> tuple[str, int]:
    """The line and the exit code of a command that this error ends. After a signal they are those
    of the signal: native code may raise another error in place of ours. Raises a SystemExit again.
    """
    number = signal_seen()
    if isinstance(error, Terminated):
        number = error.number
    if number:
        return words_of(number), 128 + number
    if isinstance(error, SystemExit):
        raise error
    from ctrans.cli.failures import explained

    return explained(error)


def _import_plugins(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> None:
    """Imports each plugin (see `import_named`)."""
    for value in values:
        from ctrans.cli.plugins import load_plugin

        load_plugin(value)


def _show_help(
    context: click.Context,
    parameter: click.Parameter,
    asked: bool,  # noqa: FBT001  # click gives it by its place
) -> None:
    """Shows the help: that of `ctrans` itself has one length."""
    if asked:
        say(context.get_help())
        context.exit()


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="ctrans")
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_show_help
)
@click.option(
    "--plugin",
    multiple=True,
    metavar="FILE|MODULE",
    expose_value=False,
    callback=_import_plugins,
    help=(
        "Repeatable: import this .py file or module of yours first. Every command then has the"
        " entries that it adds to the tables of ctrans (placements, attentions, norms, methods,"
        " screening steps, ...). This runs its code."
    ),
)
def main() -> None:
    """A stability laboratory for deep Transformers: depth as time, training as optimal control.

    \b
    ctrans simulate --placement peri --dt 0.1
    ctrans simulate --placement all --file book.txt
    ctrans screen --quick
    ctrans verify --only theorem-4
    ctrans train
    ctrans --plugin my_attention.py simulate --attention mean

    COMMAND --help shows the common options of a command, COMMAND --help-all all of them. --json
    PATH writes the result as one JSON object; PATH - is stdout.
    """
