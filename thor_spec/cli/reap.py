"""``thor-spec reap``."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from thor_spec.errors import OrphanError, StuckInKernelError

if TYPE_CHECKING:
    from thor_spec.guard.reap import Leftover


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec reap --yes")(reap)


def reap(
    yes: Annotated[bool, typer.Option("--yes", help="End and remove what is listed.")] = False,
    own: Annotated[bool, typer.Option("--own", help="Only what this run of a systemd unit started.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.", min=0)] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what jobs left behind: containers with our label, processes with a job's mark. Ends nothing without --yes.

    Exits 0 when nothing is left, 11 when something is, 40 when something cannot be ended or removed. While the lock
    files are whole, a job whose launcher lives is never touched: `thor-spec stop` is for it.
    """
    from thor_spec.guard import reap as guard
    from thor_spec.guard.locks import LockDirectory
    from thor_spec.serve.stop_requests import StopRequests

    locks, runtime = LockDirectory.find(), guard.any_runtime()
    scope = (
        guard.Scope.of_unit(locks, runtime=runtime)
        if own
        else guard.Scope(locks=locks, cgroups=guard.job_cgroups(locks), runtime=runtime)
    )
    if not yes:
        found = guard.find(scope)
        _show({"left": found}, as_json)
        if found:
            raise typer.Exit(OrphanError.exit_code)
        return
    with StopRequests() as hurry:
        done = guard.reap(scope, grace_s=grace, skip_grace=lambda: hurry.any)
    _show({"ended": done.ended, "left": done.left}, as_json)
    if done.left:
        raise StuckInKernelError(
            f"Could not be ended or removed: {', '.join(one.describe() for one in done.left)}. "
            "It may hold the device and its memory, so no job may start. Restart the container runtime, or reboot."
        )


def _show(groups: "dict[str, tuple[Leftover, ...]]", as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: [asdict(one) for one in group] for name, group in groups.items()}))
        return
    lines = [f"{name}  {one.describe()}" for name, group in groups.items() for one in group]
    print("\n".join(lines) or "nothing left")
