#!/usr/bin/env python3
"""Write ``docs/cli.md`` from the command line's own help, or with ``--check`` compare it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from thor_spec.cli.main import app

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100


def main() -> None:
    """Write or compare."""
    text = render()
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
    elif not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is not what the help says. Run `make docs`.")


def render() -> str:
    """Return the page."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="thor-spec")
    parts = [
        "# Command line",
        "Generated from `--help` by `make docs`. Results go to stdout, progress and errors to stderr. Exit codes: "
        "[errors.py](../thor_spec/errors.py).",
    ]
    for name, command, inner in commands(group, context):
        rows = [
            f"| `{'`, `'.join(parameter.opts + parameter.secondary_opts)}` | {help_of(parameter)} |"
            for parameter in command.get_params(inner)
            if parameter.param_type_name == "option"
        ]
        parts += [
            f"## {name}",
            f"```\n{' '.join(command.collect_usage_pieces(inner) or [''])}\n```".replace(
                "```\n", f"```\nthor-spec {name} ", 1
            ),
            (command.help or "").strip(),
            command.epilog or "",
            "\n".join(["| option | meaning |", "|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def commands(group: Any, context: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every command with its full name, those of groups inside included."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from commands(command, inner, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command, inner


def help_of(parameter: object) -> str:
    """Return a parameter's help and default."""
    default = getattr(parameter, "show_default", None)
    text = str(getattr(parameter, "help", "") or "")
    return f"{text} Default: {default}." if isinstance(default, str) else text


if __name__ == "__main__":
    main()
