"""The systemd unit of ``thor-spec serve``, written for one machine.

Source: systemd.service(5), systemd.exec(5), systemd.resource-control(5), systemd.unit(5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thor_spec import errors

# Another start would end the same way, or would make it worse.
FINAL_ERRORS: tuple[type[errors.ThorSpecError], ...] = (
    errors.ConfigError,
    errors.BusyError,
    errors.OrphanError,
    errors.CapacityError,
    errors.PlatformError,
    errors.LockPathError,
    errors.CanaryError,
    errors.StuckInKernelError,
    errors.MemoryNotReturnedError,
    errors.ContainerRuntimeError,
)

_TEMPLATE = """\
# Made by `thor-spec service print`. Install into /etc/systemd/system/, then: systemctl daemon-reload
[Unit]
Description=thor-spec: one model, served on one device
After=network-online.target docker.service
Wants=network-online.target
StartLimitIntervalSec=14400
StartLimitBurst=3

[Service]
# READY=1 comes once the canary set has passed; until then EXTEND_TIMEOUT_USEC moves the limit, on progress only.
Type=notify
NotifyAccess=main
TimeoutStartSec=180
# Fed by completed evaluations of liveness, not by a timer.
WatchdogSec=60
User={user}
Group={group}
ExecStart={serve}
# The kill order: a grace of 25 s, 60 s for the processes, 120 s for the memory to return.
KillMode=mixed
TimeoutStopSec=240
ExecStopPost={reap}
Restart=on-failure
RestartSec=60
RestartPreventExitStatus={final}
# Launcher and memory watchdog live in ctl/, and the launcher makes job/ beside it. systemd before 254 does not know
# ctl/; the job then has a group below theirs.
Delegate=yes
DelegateSubgroup=ctl
# Apart from system.slice, whose protected memory must not be the job's.
Slice=thorspec.slice

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What differs between machines; the rest is the same everywhere.

    Raises: ConfigError, for a name that a unit file cannot hold.
    """

    program: tuple[str, ...] = ("/usr/bin/thor-spec",)
    user: str = "thor-spec"
    group: str = "thor-spec"
    serve: tuple[str, ...] = ()
    """Arguments of ``thor-spec serve``."""

    def __post_init__(self) -> None:
        for name, value in (("--user", self.user), ("--group", self.group)):
            if not value or not all(c.isalnum() or c in "-_.$" for c in value):
                raise errors.ConfigError(f"{name} {value!r} is not the name of a user or group.")
        if not Path(self.program[0]).is_absolute():
            raise errors.ConfigError(f"The program {self.program[0]} must be an absolute path in a unit.")
        if any("\n" in argument for argument in self.serve):
            raise errors.ConfigError("An argument with a line break cannot stand in a unit file. Use a --profile file.")

    def as_text(self) -> str:
        """Return the unit file."""
        return _TEMPLATE.format(
            user=self.user,
            group=self.group,
            serve=command_line([*self.program, "serve", *self.serve]),
            reap=command_line([*self.program, "reap", "--own", "--yes"]),
            final=" ".join(str(error.exit_code) for error in FINAL_ERRORS),
        )


def command_line(argv: Sequence[str]) -> str:
    """Return ``argv`` as a line of a unit file: quoted, with no specifier or variable left to expand."""
    return " ".join(map(_quote, argv))


def _quote(argument: str) -> str:
    escaped = argument.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    plain = argument and all(c.isalnum() or c in "-_./:=@,+%$" for c in argument)
    return escaped if plain else f'"{escaped}"'
