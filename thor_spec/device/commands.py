"""Answers of the vendor's tools, asked for here or captured earlier. No answer is None."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from thor_spec import env, sysfs

TIMEOUT_S = 20.0


class Commands(Protocol):
    """Where answers come from."""

    def ask(self, argv: Sequence[str]) -> str | None:
        """Return what the command prints, errors included; None where there is no such tool, or no answer."""


class Live:
    """This machine's tools. Their input is closed: ``nvpmodel`` asks for a reboot and takes any answer."""

    def ask(self, argv: Sequence[str]) -> str | None:
        """Run the command, for 20 s at most."""
        if shutil.which(argv[0]) is None:
            return None
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
                env=env.tool_environment(),
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace")


class Captured:
    """Files that hold answers, each named as its command, with ``_`` for what is neither letter nor digit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, argv: Sequence[str]) -> str | None:
        """Read the command's file."""
        return sysfs.text(self._folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', ' '.join(argv)).strip('_')}.txt")
