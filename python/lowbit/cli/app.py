"""The ``lowbit`` program: its commands, in the order of ``lowbit --help``.

Each command is a function in a separate file. Only the file of the command that was given is imported, and modules that need
torch or transformers only where the command uses them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Annotated, Any

import typer
import typer.core

import lowbit

from ..machine.imports import import_numpy
from .models import from_hub
from .options import PUBLISH_DIRECTORY, for_typer, on_command_line
from .output import Output, quieten, reporting

# Command -> its module and function.
COMMANDS = {
    "quantize": "quantize.quantize",
    "import": "import_.import_",
    "convert": "convert.convert",
    "dequantize": "dequantize.dequantize",
    "generate": "generate.generate",
    "chat": "chat_session.chat",
    "serve": "serve.serve",
    "transcribe": "transcribe.transcribe",
    "eval": "evaluate.evaluate",
    "export": "export.export",
    "inspect": "inspect.inspect",
    "list": "cached.list_",
    "rm": "cached.rm",
    "push": "push.push",
    "report": "report.report",
    "bench": "bench.bench",
    "certify": "certify.certify",
    "tune": "tune.tune",
    "info": "info.info",
    "doctor": "doctor.doctor",
}
# Commands that run a model by its plan, if it has one, without torch; and all commands that may need no torch.
_BY_PLAN = {"bench", "certify", "chat", "generate", "serve", "transcribe"}
_PLAIN = _BY_PLAN | {"doctor", "info", "inspect", "list", "rm"}

_SETTINGS: dict[str, Any] = dict(
    help="Language models with 1- to 8-bit weights on CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_state = {"debug": False}
_OPTIONAL = {"--publish": PUBLISH_DIRECTORY}  # options with an optional value -> default value
_MODELS = {"model", "source", "path", "draft", "reference"}  # arguments that may be hub names


def _common(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    _state["debug"] = debug
    if show_version:
        print(f"lowbit {lowbit.__version__}")
        raise typer.Exit


class _Command(typer.core.TyperCommand):
    """A command whose option errors show the value, because some errors of typer only name what was expected."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = _with_values(args)
        given = list(args)
        try:
            left = list(super().parse_args(ctx, args))
            on_command_line.clear()
            for each in self.params:
                source = ctx.get_parameter_source(each.name or "")
                if source is not None and source.name == "COMMANDLINE":
                    on_command_line[each.name or ""] = each.opts[0]
            return left
        except typer.BadParameter as error:
            value = _value_of(getattr(error.param, "opts", ()), given)
            message = error.message.removeprefix("Value error, ")
            shown = value is None or repr(value) in message or (value and message.startswith(value))
            error.message = message if shown else f"{value!r}; {message[:1].lower()}{message[1:]}"
            raise


def _with_values(args: Sequence[str]) -> list[str]:
    """Adds omitted values of options, because typer does not support options with an optional value."""
    result = []
    for word, following in zip_longest(args, args[1:]):
        result.append(word)
        if word in _OPTIONAL and (following is None or following.startswith("-")):
            result.append(_OPTIONAL[word])
    return result


def _value_of(names: Collection[str], given: Sequence[str]) -> str | None:
    """The last value of an option with these names on the command line."""
    last = None
    for word, following in zip(given, [*given[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            last = value if equals else following
    return last


def _add(app: typer.Typer, name: str) -> None:
    module, _, function = COMMANDS[name].partition(".")
    command = for_typer(getattr(import_module(f".{module}", __package__), function))

    @app.command(name, cls=_Command)
    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        quieten()
        model = next((arguments[name] for name in ("model", "source") if name in arguments), None)
        as_json = arguments.get("as_json", False)
        with reporting(as_json, _state["debug"], model):
            if name not in _PLAIN:
                lowbit.load_torch()
            if name in _BY_PLAN:
                import_numpy()
            if not gc.isenabled():  # off since the start; what was imported until now stays, so it need not be searched
                gc.freeze()
                gc.enable()
            for argument in _MODELS & arguments.keys():
                arguments[argument] = from_hub(Output(as_json), arguments[argument])
            command(**arguments)


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """The program; with ``arguments``, those of a command line, only the command that they name, which is quicker."""
    app = typer.Typer(**_SETTINGS)
    app.callback(invoke_without_command=True)(_common)
    named = next((word for word in arguments or () if not word.startswith("-")), "")
    for name in [named] if named in COMMANDS else COMMANDS:
        _add(app, name)
    return app
