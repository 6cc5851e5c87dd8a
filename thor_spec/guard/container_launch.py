"""From a specification to a running container that holds the residency lock, or to nothing at all.

The caller holds admission throughout. Create and start are two calls, so that a client that hangs in either is known
for what it is, and a container that was never started holds no device.
"""

import os
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from thor_spec import env as surroundings
from thor_spec.errors import BusyError, LockPathError, PlatformError
from thor_spec.guard import cgroup, container_spec, entrypoint, marker, processes
from thor_spec.guard.container_runtime import CallFailedError, Container, ContainerRuntime, NoAnswerError
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.status import taken_by

CONFIRM_S = 10.0
CONFIRM_TICK_S = 0.02


def create(
    client: ContainerRuntime,
    spec: ContainerSpec,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None,
    directory: LockDirectory,
    job: str,
) -> str:
    """Create the container, labelled and without a restart policy, and return its id.

    Raises: PlatformError (no such image, or options that the runtime refuses); NoAnswerError; CallFailedError.
    """
    if not client.image_exists(spec.image):
        raise PlatformError(f"The image {spec.image} is not on this machine. Run `{client.name} pull {spec.image}`.")
    lock_file = directory.path / RESIDENCY
    info = os.stat(lock_file)
    invocation = surroundings.invocation_id()
    labels = {
        container_spec.JOB_LABEL: job,
        container_spec.BOOT_LABEL: processes.boot_id(),
        container_spec.LOCKS_LABEL: str(directory.path),
        **({container_spec.INVOCATION_LABEL: invocation} if invocation else {}),
    }
    arguments = spec.create_arguments(
        argv,
        labels=labels,
        env={**env, **marker.environment(job, directory.path)},
        name=f"thor-spec-{job[:8]}",
        lock_file=lock_file,
        group=info.st_gid if info.st_mode & stat.S_IRGRP else None,
        workdir=cwd,
    )
    try:
        if created := client.create(arguments):
            return created
    except CallFailedError as error:
        # The client may have died after the daemon had done its part; the label tells.
        if not (found := _by_job(client, job)):
            raise PlatformError(f"The container could not be created: {error.said or error}") from error
        return found[0].id
    raise CallFailedError(f"{client.name} create gave no id. See `{client.name} ps --all`, then `thor-spec reap`.")


def _by_job(client: ContainerRuntime, job: str) -> list[Container]:
    return [container for container in client.containers() if container.job == job]


def start(client: ContainerRuntime, created: str, directory: LockDirectory, confirm_s: float) -> Container:
    """Start the container and return it once residency is held, or once it has ended by itself.

    Raises: BusyError; LockPathError, if the lock is not seen held within ``confirm_s`` seconds; PlatformError;
        NoAnswerError; CallFailedError.
    """
    try:
        client.start(created)
    except CallFailedError as error:
        found = client.inspect([created])
        if not found or not found[0].was_started:
            raise PlatformError(f"The container could not be started: {error.said or error}") from error
    deadline = time.monotonic() + confirm_s
    while True:
        # Read from the kernel's table: a probe that takes the lock could be what the entry point finds in its way.
        holder = taken_by(directory, RESIDENCY)
        found = client.inspect([created])
        if not found:
            raise CallFailedError(f"Container {created[:12]} vanished while it was started. Somebody else removed it.")
        if not found[0].is_running and found[0].was_started:
            _require_no_refusal(found[0], directory)
            return found[0]
        if holder is not None and holder == found[0].pid:  # not just anybody: the entry point may be about to refuse
            return found[0]
        if time.monotonic() > deadline:
            raise LockPathError(
                f"{found[0].describe()} does not hold the residency lock {confirm_s:g} s after its start, so nothing "
                "would keep a second job off the device; it is ended. See that python3 is in the image and that "
                f"{directory.path / RESIDENCY} is a plain file."
            )
        time.sleep(CONFIRM_TICK_S)


def _require_no_refusal(ended: Container, directory: LockDirectory) -> None:
    if ended.exit_code == entrypoint.BUSY:
        raise BusyError("Another job took the device while the container was starting. See `thor-spec status`.")
    if ended.exit_code == entrypoint.LOCK_PATH:
        raise LockPathError(
            f"The container could not trust the residency lock in {directory.path}. "
            "Have the administrator run `thor-spec doctor --fix-lock-dir`."
        )


def kill_without_runtime(created: str, directory: LockDirectory, job: str) -> None:
    """Kill a container that took the lock, where the runtime has stopped answering; it is left for reap to remove."""
    try:
        holder = processes.read(taken_by(directory, RESIDENCY) or 0)
    except LockPathError:
        return
    group = cgroup.of_container(holder.pid, created) if holder else None
    if holder is None or not (group or marker.carries(holder, job)):
        return  # not provably ours
    if not (group and cgroup.kill(group)):
        with suppress(PermissionError):
            processes.send(holder, signal.SIGKILL)


def discard(client: ContainerRuntime, created: str, error: BaseException) -> None:
    """End and remove a container whose start failed."""
    try:
        gone = client.remove(created)
    except (CallFailedError, NoAnswerError):
        gone = False
    if not gone:
        error.add_note(f"Container {created[:12]} could not be removed. Run `thor-spec reap --yes`.")
