"""Every gate there is, by name, in the order in which ``thor-spec verify all`` runs them. New gates are added here."""

from thor_spec.errors import ConfigError
from thor_spec.gates.controls import Controls
from thor_spec.gates.distribution import Distribution
from thor_spec.gates.gate import Gate
from thor_spec.gates.lossless import Lossless
from thor_spec.gates.prefix_cache import PrefixCache

GATES: dict[str, Gate] = {gate.name: gate for gate in (Lossless(), Distribution(), Controls(), PrefixCache())}


def named(names: tuple[str, ...]) -> list[Gate]:
    """Return the gates of these names. Raises: ConfigError."""
    if unknown := [name for name in names if name not in GATES]:
        raise ConfigError(f"There is no gate {', '.join(unknown)}. There are: {', '.join(GATES)}.")
    return [GATES[name] for name in names]
