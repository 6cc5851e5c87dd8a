"""The board's system software: releases of L4T, as the vendor's files and jtop's tool write them."""

import re
from typing import NamedTuple


class Release(NamedTuple):
    """A release of L4T. It names the system, not the board: 39.2 runs on Orin and Thor alike."""

    major: int
    revision: str

    def __str__(self) -> str:
        return f"{self.major}.{self.revision}"


_RELEASE = re.compile(r"#\s*R(\d{1,4})\b[^\n]*?REVISION:\s*(\d+(?:\.\d+)*)", re.ASCII)
_JETSON_RELEASE = re.compile(r"^\s*-?\s*L4T:\s*(\d{1,4})\.(\d+(?:\.\d+)*)\s*$", re.ASCII | re.MULTILINE)
_MODEL = re.compile(r"^\s*-\s*Model:\s*(\S[^\n]*)$", re.MULTILINE)


def parse_release(text: str) -> Release | None:
    """Return the release in the text of ``/etc/nv_tegra_release``."""
    match = _RELEASE.search(text)
    return Release(int(match[1]), match[2]) if match else None


class JetsonRelease(NamedTuple):
    """What ``jetson_release -v`` says, as far as it is of use."""

    model: str | None
    release: Release | None


def parse_jetson_release(text: str) -> JetsonRelease:
    """Return the model and the release in the output of ``jetson_release -v``."""
    release, model = _JETSON_RELEASE.search(text), _MODEL.search(text)
    return JetsonRelease(
        model[1].strip() if model else None,
        Release(int(release[1]), release[2]) if release else None,
    )
