"""What a container of ours is made of. There is no room for a restart policy, host pids or a floating tag."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thor_spec.errors import ConfigError, PlatformError
from thor_spec.guard import entrypoint

JOB_LABEL = "thor-spec.job"
BOOT_LABEL = "thor-spec.boot"
LOCKS_LABEL = "thor-spec.locks"
INVOCATION_LABEL = "thor-spec.invocation"

ENTRYPOINT_TARGET = "/run/thor-spec/entrypoint.py"
SHM_WARNING_BYTES = 16 << 30

_BY_DIGEST = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}|sha256:[0-9a-f]{64}")


def is_by_digest(image: str) -> bool:
    """Return whether an image's name, ``NAME@sha256:…`` or ``sha256:…``, cannot point to another build tomorrow."""
    return _BY_DIGEST.fullmatch(image) is not None


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the host, at the same path inside, so that arguments need no translation."""

    source: Path
    writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """An image by digest and what it may see of the host.

    Raises: PlatformError, for an image that is not named by digest; ConfigError, for a mount that cannot work.
    """

    image: str
    mounts: tuple[Mount, ...] = ()
    gpu_runtime: str | None = "nvidia"
    """``--runtime``; hosts in CSV mode refuse ``--gpus``. None leaves the runtime's default."""
    shm_bytes: int | None = None
    """Size of ``/dev/shm``; None shares the host's (``--ipc=host``)."""

    def __post_init__(self) -> None:
        if not is_by_digest(self.image):
            raise PlatformError(
                f"The image {self.image} is not named by digest, and a tag may point to another build tomorrow. "
                "Name it as NAME@sha256:…; see `docker images --digests`."
            )
        for mount in self.mounts:
            # --mount takes a comma-separated list.
            if not mount.source.is_absolute() or "," in str(mount.source):
                raise ConfigError(f"The mount {mount.source} must be an absolute path without a comma.")
            if not mount.source.exists():
                raise ConfigError(f"The mount {mount.source} does not exist. Name a file or directory of this machine.")
        if self.shm_bytes is not None and self.shm_bytes <= 0:
            raise ConfigError(f"A shared memory of {self.shm_bytes} bytes must be positive.")

    def warnings(self) -> tuple[str, ...]:
        """Return what works but is likely to be regretted."""
        if self.shm_bytes is not None and self.shm_bytes > SHM_WARNING_BYTES:
            return (
                f"Shared memory of {self.shm_bytes / (1 << 30):.0f} GiB comes out of the same memory as the model. "
                "8 to 16 GiB are enough for one engine.",
            )
        return ()

    def create_arguments(
        self,
        argv: Sequence[str],
        *,
        labels: Mapping[str, str],
        env: Mapping[str, str],
        name: str,
        lock_file: Path,
        group: int | None = None,
        workdir: Path | None = None,
    ) -> tuple[str, ...]:
        """Return the arguments behind ``docker create``.

        Args:
            env: set inside; nothing of the host's environment is. Visible to whoever may inspect the container.
            lock_file: the residency lock on the host.
            group: numeric group that may open the lock file, for images that do not run as root.
        """
        ours = (
            (Path(entrypoint.__file__).resolve(), ENTRYPOINT_TARGET, False),
            (lock_file, entrypoint.LOCK, False),  # locking needs no write access
        )
        mounts = (*ours, *((mount.source, str(mount.source), mount.writable) for mount in self.mounts))
        options = ["create", "--pull", "never", "--name", name, "--network", "host"]
        options += ["--ipc", "host"] if self.shm_bytes is None else ["--shm-size", str(self.shm_bytes)]
        options += ["--runtime", self.gpu_runtime] if self.gpu_runtime else []
        options += ["--group-add", str(group)] if group is not None else []
        options += ["--workdir", str(workdir)] if workdir else []
        for key, value in labels.items():
            options += ["--label", f"{key}={value}"]
        for key, value in env.items():
            options += ["--env", f"{key}={value}"]
        for source, target, writable in mounts:
            # Not -v: that would make a directory where the source is missing, and the lock would be another one.
            access = "" if writable else ",readonly"
            options += ["--mount", f"type=bind,source={source},target={target}{access}"]
        # -I and -S: nothing in the image may run before the lock is taken.
        command = ["-I", "-S", ENTRYPOINT_TARGET, "--lock", entrypoint.LOCK, "--", *argv]
        return (*options, "--entrypoint", "python3", self.image, *command)
