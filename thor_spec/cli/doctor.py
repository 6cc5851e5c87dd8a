"""``thor-spec doctor``."""

import json
from typing import Annotated

import typer

from thor_spec.errors import PlatformError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec doctor --json")(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine and environment, each line with a remedy. Exits 13 when something fails."""
    from thor_spec.doctor.checks import examine

    report = examine()
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if report.failed:
        raise typer.Exit(PlatformError.exit_code)
