"""One class per exit code. The command line catches them once and shows their text without a traceback.

The text says what happened, why it matters and what to do. Codes are part of the interface: service managers and
scripts decide by them whether another start makes sense.
"""


class ThorSpecError(Exception):
    """An expected failure; the base class is used only where no code below fits."""

    exit_code = 1


class GateError(ThorSpecError):
    """A gate is red, or a benchmark has a reason not to report; the text says which and why."""

    exit_code = 1


class InterruptedJobError(ThorSpecError):
    """A stop was asked for before a job had its result."""

    exit_code = 1


class ConfigError(ThorSpecError):
    """The request cannot be carried out as written: options, a checkpoint, or a profile contradict themselves."""

    exit_code = 2  # usage errors of the command line parser exit 2 as well


class BusyError(ThorSpecError):
    """Another job holds the device."""

    exit_code = 10


class OrphanError(ThorSpecError):
    """An engine without a supervisor is still alive."""

    exit_code = 11


class CapacityError(ThorSpecError):
    """The job does not fit into the memory that is free above the floor."""

    exit_code = 12


class PlatformError(ThorSpecError):
    """This machine or this combination of versions cannot run the job."""

    exit_code = 13


class SeamMovedError(PlatformError):
    """vLLM changed at a place that the plugin relies on."""


class LockPathError(ThorSpecError):
    """The lock or runtime directory is missing, replaced or not writable."""

    exit_code = 14


class EngineStartError(ThorSpecError):
    """The engine ended before it was ready."""

    exit_code = 20


class StartDeadlineError(ThorSpecError):
    """A start phase made no progress within its limit."""

    exit_code = 21


class CanaryError(ThorSpecError):
    """The engine answers, but not what it must."""

    exit_code = 22


class FailedRequestError(CanaryError):
    """A request of the canary got no answer: the engine may be dying, which tells more."""


class MemoryGuardError(ThorSpecError):
    """The watchdog stopped the job to keep the board alive."""

    exit_code = 30


class StalledError(ThorSpecError):
    """The engine is alive and makes no progress."""

    exit_code = 31


class EngineDeadError(ThorSpecError):
    """The engine ended after it was ready, without being asked to."""

    exit_code = 32


class StuckInKernelError(ThorSpecError):
    """A process survived SIGKILL; the board needs a reboot."""

    exit_code = 40


class MemoryNotReturnedError(ThorSpecError):
    """The job is gone and its memory is not back."""

    exit_code = 41


class ContainerRuntimeError(ThorSpecError):
    """The container runtime does not answer."""

    exit_code = 42


class GuardFailureError(ThorSpecError):
    """The guard itself failed; the job was stopped because nothing watches it."""

    exit_code = 70


def with_exit_code(code: int) -> type[ThorSpecError]:
    """Return the class of an exit code that came from another process."""
    return next((kind for kind in ThorSpecError.__subclasses__() if kind.exit_code == code != 1), ThorSpecError)
