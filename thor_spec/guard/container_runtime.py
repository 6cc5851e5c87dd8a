"""The container runtime, asked through its command line: docker, or podman where that is what is there.

Every call is bounded. One that only asks is killed when it does not answer; one that changes something is left to end
by itself, since a client killed in the middle leaves a container that nobody knows of and that holds the GPU.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from thor_spec import env
from thor_spec.errors import ContainerRuntimeError, PlatformError
from thor_spec.guard.container_spec import BOOT_LABEL, INVOCATION_LABEL, JOB_LABEL, LOCKS_LABEL

NAMES = ("docker", "podman")
ANSWER_S = 20.0
CHANGE_S = 60.0


class NoAnswerError(ContainerRuntimeError):
    """A call was not answered in time: the daemon hangs."""


class CallFailedError(ContainerRuntimeError):
    """A call was answered with a failure: ``said`` is the last line of the message, ``printed`` the whole result."""

    def __init__(self, text: str, *, said: str = "", printed: str = "") -> None:
        super().__init__(text)
        self.said = said
        self.printed = printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as the runtime describes it. ``pid`` is that of its first process on the host, 0 if none runs."""

    id: str
    name: str
    state: str  # created, running, exited, …
    pid: int
    exit_code: int
    image: str
    labels: Mapping[str, str]

    @property
    def job(self) -> str:
        """Uuid of the job, from the label."""
        return self.labels.get(JOB_LABEL, "")

    @property
    def boot(self) -> str:
        """Id of the boot that it was made in, from the label."""
        return self.labels.get(BOOT_LABEL, "")

    @property
    def locks(self) -> str | None:
        """Lock directory of its job, from the label."""
        return self.labels.get(LOCKS_LABEL)

    @property
    def invocation(self) -> str | None:
        """Systemd's id of the run of the unit that started it, from the label."""
        return self.labels.get(INVOCATION_LABEL)

    @property
    def is_running(self) -> bool:
        """Whether it has processes, be they paused."""
        return self.state in ("running", "paused", "restarting", "removing", "stopping")

    @property
    def was_started(self) -> bool:
        """Whether its first process ever ran."""
        return self.state not in ("created", "configured", "initialized")

    def describe(self) -> str:
        """Return id, state and image in a few words."""
        return f"container {self.id[:12]} ({self.name}, {self.state}, {self.image})"


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """One command line client. Times are in seconds."""

    program: str
    answer_s: float = ANSWER_S
    change_s: float = CHANGE_S
    left_behind: list["subprocess.Popen[bytes]"] = field(default_factory=list, compare=False)

    @classmethod
    def find(cls) -> "ContainerRuntime":
        """Return docker, else podman.

        Raises: PlatformError, if neither is on the PATH.
        """
        if program := next(filter(None, map(shutil.which, NAMES)), None):
            return cls(program)
        raise PlatformError("Neither docker nor podman is on the PATH. Install one, or run without --container.")

    @property
    def name(self) -> str:
        """Name of the program, for messages."""
        return self.program.rpartition("/")[2]

    def containers(self) -> tuple[Container, ...]:
        """Return every container that carries our label, in any state and from any boot.

        Raises: NoAnswerError; CallFailedError.
        """
        listed = self.ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={JOB_LABEL}")
        return self.inspect(listed.split()) if listed.split() else ()

    def inspect(self, ids: Iterable[str]) -> tuple[Container, ...]:
        """Return those containers that exist. Raises: NoAnswerError; CallFailedError."""
        try:
            answer = self.ask("inspect", "--type", "container", *ids)
        except CallFailedError as error:
            if "no such" not in error.said.lower():
                raise
            answer = error.printed.strip() or "[]"  # what it did find
        try:
            return tuple(map(_container, json.loads(answer)))
        except (ValueError, KeyError, TypeError) as error:
            raise CallFailedError(f"{self.name} inspect gave no description: {answer[:80]!r}.") from error

    def image_exists(self, image: str) -> bool:
        """Return whether the image is on this machine. Raises: NoAnswerError."""
        try:
            self.ask("image", "inspect", image)
        except CallFailedError:
            return False
        return True

    def create(self, arguments: Sequence[str]) -> str:
        """Create a container and return its id. Raises: NoAnswerError, with the client left alone; CallFailedError."""
        return self.change(*arguments).strip().rpartition("\n")[2]

    def start(self, container_id: str) -> None:
        """Start it. Raises: NoAnswerError, with the client left alone; CallFailedError."""
        self.change("start", container_id)

    def signal(self, container_id: str, name: str) -> bool:
        """Signal its first process; return whether the runtime said that it did. Not ``stop``, which can hang."""
        try:
            self.ask("kill", "--signal", name, container_id)
        except CallFailedError:
            return False  # it has ended meanwhile, or we may not
        return True

    def remove(self, container_id: str) -> bool:
        """Remove it in whatever state; return whether it is gone. Raises: NoAnswerError, if the answer stays out."""
        with suppress(CallFailedError):
            self.change("rm", "--force", container_id)
        return not self.inspect([container_id])

    def follow(self, container_id: str, output: int | None, *, since: float | None = None) -> "subprocess.Popen[bytes]":
        """Copy its output to a descriptor until it ends, or to ours; ``since`` (Unix time) skips what is older."""
        after = ("--since", f"{since:.3f}") if since is not None else ()
        return self._popen(("logs", "--follow", *after, container_id), output, None)

    def ask(self, *arguments: str) -> str:
        """Run a call that changes nothing we would miss, and return what it printed."""
        return self._run(arguments, self.answer_s, leave=False)

    def change(self, *arguments: str) -> str:
        """Run a call that must not be interrupted, and return what it printed."""
        return self._run(arguments, self.change_s, leave=True)

    def _run(self, arguments: tuple[str, ...], timeout_s: float, *, leave: bool) -> str:
        # Files, not pipes: a client that is left behind must not die of our end.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self._popen(arguments, out.fileno(), err.fileno())
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                if leave:
                    self.left_behind.append(process)
                else:
                    process.kill()
                    process.wait()
                raise NoAnswerError(self._no_answer(arguments[0], timeout_s, process.pid if leave else None)) from None
            except BaseException:
                (self.left_behind.append if leave else _end)(process)
                raise
            printed, said = (_text(file) for file in (out, err))
        if code:
            line = (said.strip() or printed.strip()).rpartition("\n")[2]
            text = f"{self.name} {arguments[0]} failed (status {code}): {line}"
            raise CallFailedError(text, said=line, printed=printed)
        return printed

    def _popen(self, arguments: tuple[str, ...], out: int | None, err: int | None) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            (self.program, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if err is None and out is not None else err,
            env=env.tool_environment(),
            start_new_session=True,  # a Ctrl-C is for us; a client that it interrupted would leave half a container
        )

    def _no_answer(self, verb: str, timeout_s: float, left: int | None) -> str:
        what = f"{self.name} {verb} has not answered within {timeout_s:g} s, so the state of the device is unknown."
        if left is None:
            return f"{what} See `systemctl status {self.name}`; if it stays like this, reboot the board."
        return (
            f"{what} Its client (pid {left}) is left to end by itself, because killing it can leave a container that "
            f"holds the GPU. See `systemctl status {self.name}`, then `thor-spec reap`."
        )


def _container(described: Mapping[str, Any]) -> Container:
    state = described["State"]
    return Container(
        id=described["Id"],
        name=described["Name"].removeprefix("/"),
        state=str(state["Status"]).lower(),
        pid=int(state.get("Pid") or 0),
        exit_code=int(state.get("ExitCode") or 0),
        image=str(described["Config"].get("Image") or described.get("ImageName") or "?"),
        labels=described["Config"].get("Labels") or {},
    )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
