"""What a start tells those who watch it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thor_spec.guard.identity import Identity
from thor_spec.serve.phases import Phase

if TYPE_CHECKING:
    from thor_spec.serve.metrics import KVCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """An engine that passed its canary."""

    url: str
    model: str
    drafter: str | None
    draft_tokens: int
    adaptive_drafts: bool
    """Whether fewer drafts are made, or none, where more do not pay."""
    tree: str
    """Shape of draft trees, as ``--tree`` takes it; empty: chains."""
    drafter_window: int | None
    """Tokens that the drafter looks back on; None: as many as its checkpoint says."""
    accept: str
    """Rule for drafts of requests that name none; any other than ``exact`` is lossy."""
    denoise: str
    """How a block-diffusion model denoises for requests that do not say; empty for any other model."""
    context: int
    kv: "KVCapacity | None"
    recurrent_state: str
    """What a sequence of a hybrid keeps, in words; empty without recurrent layers."""
    prefix_caching: str
    """Whether prefixes are cached, and why."""
    checks: tuple[str, ...]
    seconds: float
    """From the command to now."""
    pid: int
    log_file: Path
    margin_bytes: int | None = None
    """MemAvailable above the floor that the watchdog defends, with the engine loaded and warm."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return {**asdict(self), "log_file": str(self.log_file)}


class Events(Protocol):
    """Told in the launcher's main thread; must return at once."""

    def waiting(self, holder: Identity | None) -> None:
        """Another job holds the device, and ``--wait`` was given."""

    def phase(self, phase: Phase) -> None:
        """A phase began."""

    def ready(self, ready: Ready) -> None:
        """The canary passed."""

    def notice(self, line: str) -> None:
        """Something that a person should know; the start or the engine goes on."""

    def stopping(self) -> None:
        """A stop was asked for."""
