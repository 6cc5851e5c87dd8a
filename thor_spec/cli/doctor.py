"""``thor-spec doctor``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thor_spec.errors import ConfigError, PlatformError

if TYPE_CHECKING:
    from thor_spec.doctor.report import Report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec doctor --json")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="Read an engine's log instead, for its cause and remedy.", metavar="FILE")
    ] = None,
    container: Annotated[
        bool, typer.Option("--container", help="Check the container this runs in: what differs from its base.")
    ] = False,
    image: Annotated[
        str | None, typer.Option(help="Check an image's name instead: by digest, and none known as bad.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Check the board files below a folder instead, as captured.", metavar="FOLDER")
    ] = None,
    fix_lock_dir: Annotated[
        bool,
        typer.Option("--fix-lock-dir", help="As root: make the lock directory for all users, or put it right."),
    ] = False,
) -> None:
    """Check this machine and environment, each line with a remedy. Exits 13 when something fails.

    With --fix-lock-dir nothing is checked. It refuses while a job runs, or may run under files that were deleted.
    """
    if sum((log is not None, container, image is not None, root is not None, fix_lock_dir)) > 1:
        raise ConfigError("--log, --container, --image, --root and --fix-lock-dir exclude each other.")
    if fix_lock_dir:
        from thor_spec.guard.lock_setup import fix

        done = fix()
        print(json.dumps({"done": done}) if as_json else "\n".join(done) or "nothing to do")
        return
    report = _report(log, container, image, root)
    print(json.dumps(report.as_dict()) if as_json else report.as_text())
    if report.failed:
        raise typer.Exit(PlatformError.exit_code)


def _report(log: Path | None, container: bool, image: str | None, root: Path | None) -> "Report":
    if log is not None:
        from thor_spec.doctor import start_log
        from thor_spec.serve.failure import first_odd_line

        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"The log {log} cannot be read ({error.strerror}).") from error
        return start_log.examine(lines, first_odd_line)
    if container:
        from thor_spec.doctor import container as inside

        return inside.examine()
    from thor_spec.doctor import checks

    if image is not None:
        return checks.examine_image(image)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root {root} is not a folder.")
    return checks.examine(root or Path("/"))
