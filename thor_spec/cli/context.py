"""What a command knows beside its own options."""

from dataclasses import dataclass


@dataclass(slots=True)
class Context:
    """``rest`` is what followed ``--`` on the command line."""

    rest: tuple[str, ...] = ()
    has_rest: bool = False
    debug: bool = False
