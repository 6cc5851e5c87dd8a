"""``thor-spec run``, ``status`` and ``stop``: any job under the guard, and looking at it from another terminal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thor_spec.cli.engine_options import size_option
from thor_spec.cli.notes import note
from thor_spec.errors import BusyError, ConfigError, PlatformError, ThorSpecError

if TYPE_CHECKING:
    from thor_spec.guard.container_spec import ContainerSpec
    from thor_spec.guard.identity import Identity
    from thor_spec.serve.stop_requests import StopRequests

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
        size_option(
            "MemAvailable below which the job is killed, e.g. 6GiB.", show_default="4 GiB, or 3 % of all memory if more"
        ),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(help="Run it in a container of this image, which must be here.", metavar="IMAGE@sha256:DIGEST"),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(help="With --container: show this path inside, at the same place; PATH:rw to write it."),
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="With --container: how the GPU gets in; 'default' is the daemon's own.")
    ] = "nvidia",
    shm_size: Annotated[
        int | None,
        typer.Option(help="With --container: bytes of /dev/shm.", metavar="BYTES", show_default="the host's"),
    ] = None,
) -> None:
    """Run any command as the device's one job, under the memory watchdog; its exit code is passed on.

    A command that dies by a signal gives 128 plus the signal's number. One that takes too much memory is killed (30).
    """
    from thor_spec.guard.guarded import Settings
    from thor_spec.serve.stop_requests import StopRequests

    argv = context.obj.rest
    if not argv:
        raise ConfigError("thor-spec run needs a command after --. Example: thor-spec run -- python train.py")
    if container is None and (mount or shm_size is not None):
        raise ConfigError("--mount and --shm-size are for a container. Name its image with --container.")

    def waiting(holder: "Identity | None") -> None:
        note(f"Waiting for {holder.describe() if holder else 'the device'}")

    def tell(line: str) -> None:
        note(f"thor-spec: {line}")

    spec = None if container is None else _spec(container, mount or [], runtime, shm_size, tell)
    with StopRequests() as stopping:
        try:
            code = _guarded(
                argv,
                stopping,
                tell,
                spec=spec,
                settings=Settings(floor_bytes=memory_floor),
                grace_s=grace,
                wait=wait,
                report=waiting,
            )
        except BusyError:
            if not stopping.any:  # else: asked to stop while it waited
                raise
    raise typer.Exit(0 if stopping.any else code)


def _guarded(argv: Sequence[str], stopping: "StopRequests", tell: "Callable[[str], None]", **options: Any) -> int:
    """Run the command to its end, or until a stop is asked for; return its exit status."""
    from thor_spec.guard.guarded import GuardedJob

    def give_up() -> bool:
        return stopping.any

    with GuardedJob.start(argv, notice=tell, title=f"run {argv[0]}", give_up=give_up, **options) as guarded:
        guarded.note_phase("running")
        while (code := guarded.job.wait(CHECK_S)) is None and not stopping.any:
            guarded.check()
        if code is None:
            return guarded.stop(skip_grace=stopping.urgent)
        guarded.check()  # the end may be the watchdog's doing
        guarded.cause, guarded.exit_code = f"the command ended with status {code}", code
        return code


def _spec(
    image: str, mounts: list[str], runtime: str, shm_size: int | None, warn: "Callable[[str], None]"
) -> "ContainerSpec":
    from thor_spec.device import board
    from thor_spec.guard.container_spec import ContainerSpec, Mount
    from thor_spec.known import combinations

    spec = ContainerSpec(
        image=image,
        mounts=tuple(Mount(Path(path.removesuffix(":rw")), path.endswith(":rw")) for path in mounts),
        gpu_runtime=None if runtime == "default" else runtime,
        shm_bytes=shm_size,
    )
    for warning in spec.warnings():
        warn(warning)
    facts = {"board": str(board.detect(Path("/"), None).kind), **combinations.of_image(image)}
    for bad in combinations.matching(facts):
        raise PlatformError(f"{bad.name}: {bad.describe()}. {bad.remedy}")
    return spec


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Show how the last job ended instead.")] = False,
) -> None:
    """Show which job holds the device. Takes no lock; exits 0 whether or not one runs."""
    from thor_spec.cli.look import show_status

    show_status(as_json=as_json, last=last)


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
