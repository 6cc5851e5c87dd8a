"""``thor-spec version``."""

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec version --json")(version)


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the versions of thor-spec and of what it stands on."""
    from thor_spec import provenance

    versions = provenance.package_versions()
    if as_json:
        print(json.dumps(versions))
        return
    for name, found in versions.items():
        print(f"{name} {found}")
