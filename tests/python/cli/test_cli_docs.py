"""docs/cli.md agrees with the program: commands, options, defaults."""

import re

import pytest
import typer.main
from command_line import ROOT, section
from lowbit.cli.app import make_app


def test_docs_have_every_command():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == list(typer.main.get_command(make_app()).commands)


def test_every_command_that_quantizes_takes_activation_bits():
    commands = typer.main.get_command(make_app()).commands
    options = {name: {option for each in command.params for option in each.opts} for name, command in commands.items()}
    quantizing = {name for name, names in options.items() if "--bits" in names}
    assert {"quantize", "generate", "chat", "serve", "transcribe", "eval", "export", "report", "bench", "tune"} <= quantizing
    assert quantizing | {"import", "convert"} == {name for name, names in options.items() if "--activation-bits" in names}


@pytest.mark.parametrize("command", sorted(typer.main.get_command(make_app()).commands))
def test_docs_have_every_option_and_default(command):
    documented = {
        option: default.strip() for option, default in re.findall(r"^\| `(--[a-z0-9-]+)` \|(.*?)\|", section(command), re.M)
    }
    options = {}
    for parameter in typer.main.get_command(make_app()).commands[command].params:
        if parameter.param_type_name == "option" and parameter.name not in ("as_json", "help"):
            default = parameter.default
            if isinstance(default, tuple | list):
                default = ", ".join(each.value for each in default)
            shown = "" if default is None else "off" if default is False else str(default)
            options[parameter.opts[0]] = "required" if parameter.required else shown
    assert documented == options
    assert f"\n    lowbit {command} " in section(command) or command in ("info", "doctor", "list")
