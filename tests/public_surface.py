"""What users rely on, as one JSON document: command line, schemas of files, public names, options and arguments.

``python tests/public_surface.py > tests/public_surface.json`` from the sources of a release keeps what it had, for
``test_public_names.py`` to hold later ones against.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

PACKAGES = (
    "deepspeed_partition",
    "deepspeed_partition.engine",
    "deepspeed_partition.profiling",
    "lightning_madpipe",
)


def surface() -> dict[str, Any]:
    """All parts by name, in what JSON knows."""
    return {
        "names": {
            package: sorted(importlib.import_module(package).__all__)
            for package in (*PACKAGES, "lightning_madpipe")
        },
        "commands": _commands(),
        "options": _options(),
        "MadPipeStrategy": _arguments(),
        "schemas": _schemas(),
    }


def _commands() -> dict[str, Any]:
    """Each command: arguments and options by their names on the command line, with default and type."""
    import click

    from deepspeed_partition.cli import cli

    with click.Context(cli) as context:
        commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {"madpipe": _parameters(cli)} | {name: _parameters(command) for name, command in commands.items()}


def _parameters(command: Any) -> dict[str, str]:
    return {
        "/".join([*parameter.opts, *parameter.secondary_opts]): _told(parameter) for parameter in command.params
    }


def _told(parameter: Any) -> str:
    needed = "required" if parameter.required else f"default {parameter.default!r}"
    if "UNSET" in needed:  # how newer releases of click say None
        needed = "default None"
    kind = (
        f"one of {', '.join(parameter.type.choices)}"
        if hasattr(parameter.type, "choices")
        else parameter.type.name
    )
    return f"{parameter.param_type_name}, {needed}, {kind}, {parameter.nargs} value"


def _options() -> dict[str, str]:
    from deepspeed_partition.options import Options

    return {field.name: repr(field.default) for field in fields(Options)}


def _arguments() -> dict[str, str]:
    import lightning_madpipe

    parameters = inspect.signature(lightning_madpipe.MadPipeStrategy).parameters
    return {name: repr(parameter.default) for name, parameter in parameters.items() if name != "unknown"}


def _schemas() -> dict[str, Any]:
    import deepspeed_partition

    files = Path(deepspeed_partition.__file__).parent.rglob("*.schema.json")
    return {file.name: json.loads(file.read_text()) for file in sorted(files)}


if __name__ == "__main__":
    json.dump(surface(), sys.stdout, indent=1, sort_keys=True)
    print()
