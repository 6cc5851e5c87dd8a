"""``thor-spec doctor``."""

import json
from typing import Annotated

import typer

from thor_spec.errors import PlatformError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec doctor --json")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix_lock_dir: Annotated[
        bool,
        typer.Option("--fix-lock-dir", help="As root: make the lock directory for all users, or put it right."),
    ] = False,
) -> None:
    """Check this machine and environment, each line with a remedy. Exits 13 when something fails.

    With --fix-lock-dir nothing is checked. It refuses while a job runs, or may run under files that were deleted.
    """
    if fix_lock_dir:
        from thor_spec.guard.lock_setup import fix

        done = fix()
        print(json.dumps({"done": done}) if as_json else "\n".join(done) or "nothing to do")
        return
    from thor_spec.doctor.checks import examine

    report = examine()
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if report.failed:
        raise typer.Exit(PlatformError.exit_code)
