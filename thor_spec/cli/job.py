"""``thor-spec run``, ``status`` and ``stop``: any job under the guard, and looking at it from another terminal."""

import json
import sys
from typing import Annotated

import typer

from thor_spec.errors import ConfigError, ThorSpecError

TABLE_WIDTH = 10
CHECK_S = 0.2


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        options_metavar="[OPTIONS] -- COMMAND [ARGS]...",
        epilog="Example: thor-spec run -- python train.py --epochs 3",
    )(run)
    app.command(epilog="Example: thor-spec status --json")(status)
    app.command(epilog="Example: thor-spec stop --now")(stop)


def run(
    context: typer.Context,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the device is free.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL when stopped.", min=0)] = 25.0,
    memory_floor: Annotated[
        int | None,
        typer.Option(
            help="MemAvailable below which the job is killed.",
            metavar="BYTES",
            min=0,
            show_default="4 GiB, or 3 % of all memory if more",
        ),
    ] = None,
) -> None:
    """Run any command as the device's one job, under the memory watchdog; its exit code is passed on.

    A command that dies by a signal gives 128 plus the signal's number. One that takes too much memory is killed (30).
    """
    from thor_spec.guard.guarded import GuardedJob, Settings
    from thor_spec.guard.identity import Identity
    from thor_spec.serve.stop_requests import StopRequests

    if not context.obj.rest:
        raise ConfigError("thor-spec run needs a command after --. Example: thor-spec run -- python train.py")

    def waiting(holder: Identity | None) -> None:
        print(f"Waiting for {holder.describe() if holder else 'the device'}", file=sys.stderr)

    with StopRequests() as stopping:
        argv = context.obj.rest
        with GuardedJob.start(
            argv,
            settings=Settings(floor_bytes=memory_floor),
            notice=lambda line: print(f"thor-spec: {line}", file=sys.stderr),
            title=f"run {argv[0]}",
            grace_s=grace,
            wait=wait,
            report=waiting,
        ) as guarded:
            while (code := guarded.job.wait(CHECK_S)) is None and not stopping.any:
                guarded.check()
            if code is None:
                code = guarded.stop(skip_grace=stopping.urgent)
            else:
                guarded.check()  # the end may be the watchdog's doing
                guarded.cause = f"the command ended with status {code}"
    raise typer.Exit(0 if stopping.any else code)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Show how the last job ended instead.")] = False,
) -> None:
    """Show which job holds the device. Takes no lock; exits 0 whether or not one runs."""
    if last:
        _show_last(as_json)
        return
    from thor_spec.guard.status import status as look

    found = look()
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    if not found.held:
        print("free")
        return
    rows: dict[str, str] = {}
    if holder := found.holder:
        rows = {
            "job": holder.title or " ".join(holder.argv),
            "phase": holder.phase,
            "url": holder.url or "-",
            "launcher": f"pid {holder.pid}",
            "since": holder.started_at,
            "uptime": _seconds(found.uptime_s),
            "margin": _margin(found.margin_bytes),
            "last token": "-" if found.last_token_s is None else f"{_seconds(found.last_token_s)} ago",
            "throttled": {True: "yes", False: "no", None: "?"}[found.throttled],
            "log": holder.log_file or "-",
        }
    rows |= {"processes": " ".join(map(str, found.pids)) or "-", "locks": found.lock_dir}
    _print_rows(rows)


def _show_last(as_json: bool) -> None:
    from thor_spec import env
    from thor_spec.guard import processes
    from thor_spec.guard.state import StateStore

    record = StateStore(env.state_dir()).read()
    if as_json:
        print(json.dumps(record.as_dict() if record else None))
        return
    if record is None:
        print("no record")
        return
    code = "?" if record.exit_code is None else str(record.exit_code)
    before = "" if record.boot_id == processes.boot_id() else ", before the last boot"
    rows = {
        "job": record.title or "-",
        "cause": record.cause.replace("\n", " "),
        "exit code": code,
        "ended": f"{record.utc}{before}",
        "phase": record.phase or "-",
        "uptime": _seconds(record.uptime_s),
        "margin": f"{_margin(record.margin_bytes)}; least {_margin(record.least_margin_bytes)}",
    }
    if record.trigger:
        rows["trigger"] = f"{record.trigger.get('kind')}: {record.trigger.get('value')} ({record.trigger.get('limit')})"
    rows |= {"log": record.log_file or "-"} | ({"dump": record.dump} if record.dump else {})
    _print_rows(rows)
    for line in record.notices:
        print(f"{'notice':{TABLE_WIDTH}} {line}")
    for line in record.log_tail:
        print(f"{'':{TABLE_WIDTH}} | {line}")


def _print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        print(f"{name:{TABLE_WIDTH}} {value}")


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} s"


def _margin(value: int | None) -> str:
    return "?" if value is None else f"{value / (1 << 30):.2f} GiB above the floor"


def stop(
    now: Annotated[bool, typer.Option("--now", help="Skip the grace: kill at once.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the device to be free.", min=0)] = 120.0,
) -> None:
    """Stop the job that holds the device, and wait until it is gone."""
    from thor_spec.guard.status import stop as end

    ended = end(now=now, timeout_s=timeout)
    if ended.holder is None:
        print("nothing to stop")
    elif ended.free:
        print(f"stopped {ended.holder.title or ended.holder.argv[0]} (pid {ended.holder.pid})")
    else:
        raise ThorSpecError(
            f"pid {ended.holder.pid} has not ended within {timeout:g} s. Try `thor-spec stop --now`, and look at "
            f"{ended.holder.log_file or 'its log'}."
        )
