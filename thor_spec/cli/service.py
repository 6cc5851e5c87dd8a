"""``thor-spec service``."""

import grp
import os
import pwd
import sys
from pathlib import Path
from typing import Annotated

import typer

GROUP = "thor-spec"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    service = typer.Typer(name="service", help="The systemd unit of `thor-spec serve`.", no_args_is_help=True)
    service.callback()(_group)
    service.command(
        "print",
        options_metavar="[OPTIONS] [-- SERVE_ARGS...]",
        epilog="Example: thor-spec service print --user thor-spec -- ./Qwen3.6-35B-A3B --context 32768",
    )(show)
    app.add_typer(service)


def _group() -> None:
    """Keep `print` a command of its own."""


def show(
    context: typer.Context,
    user: Annotated[str | None, typer.Option(help="User that serves.", show_default="you")] = None,
    group: Annotated[
        str | None, typer.Option(help="Group that may use the device.", show_default="thor-spec, else your own")
    ] = None,
) -> None:
    """Print the unit for this machine. Arguments after -- are those of `thor-spec serve`.

    `systemctl start` returns once the canary set has passed. What a killed server leaves is reaped before the next
    start; failures that another start cannot mend are not repeated.
    """
    from thor_spec.guard.unit import Unit

    unit = Unit(
        program=_program(),
        user=user or pwd.getpwuid(os.getuid()).pw_name,
        group=group or _default_group(),
        serve=context.obj.rest,
    )
    print(unit.as_text(), end="")


def _program() -> tuple[str, ...]:
    script = Path(sys.executable).with_name("thor-spec")
    return (str(script),) if script.exists() else (sys.executable, "-m", "thor_spec")


def _default_group() -> str:
    try:
        return grp.getgrnam(GROUP).gr_name
    except KeyError:
        return grp.getgrgid(os.getgid()).gr_name
