#!/usr/bin/env python3
"""Look after ``deploy/pins.yaml``: ``check`` its form, ``show`` a slot's image, ``refresh`` a slot from its tag."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

PINS = Path(__file__).resolve().parent.parent / "deploy" / "pins.yaml"
FIELDS = {"use", "tag", "platform", "digest", "refreshed", "note"}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TIMEOUT_S = 120


def main(arguments: list[str]) -> None:
    """Run one command; exit with a line where it cannot be done."""
    match arguments:
        case ["check"]:
            check(read())
        case ["show", name]:
            print(image(read(), name))
        case ["refresh", name]:
            refresh(name)
        case _:
            sys.exit("usage: pins.py check | show SLOT | refresh SLOT")


def read() -> dict[str, Any]:
    """Return the slots."""
    content = yaml.safe_load(PINS.read_text(encoding="utf-8"))
    slots: dict[str, Any] = content["images"]
    return slots


def check(slots: dict[str, Any]) -> None:
    """Print the state of each slot. Exits 1 on a wrong one."""
    wrong = False
    for name, slot in slots.items():
        problems = [f"fields must be {', '.join(sorted(FIELDS))}"] if set(slot) != FIELDS else []
        digest = slot.get("digest")
        if digest is not None and not DIGEST.fullmatch(str(digest)):
            problems.append(f"digest {digest} is not sha256: and 64 hex digits")
        if (digest is None) != (slot.get("refreshed") is None):
            problems.append("digest and refreshed belong together")
        wrong |= bool(problems)
        print(f"{name:14} {'; '.join(problems) or (digest or 'empty')}")
    if wrong:
        sys.exit(1)


def image(slots: dict[str, Any], name: str) -> str:
    """Return a slot's image by digest. Exits where there is none."""
    if name not in slots:
        sys.exit(f"There is no slot {name}. Known: {', '.join(slots)}.")
    slot = slots[name]
    if slot["digest"] is None:
        sys.exit(f"The slot {name} is empty. Fill it: python tools/pins.py refresh {name}")
    return f"{str(slot['tag']).rpartition(':')[0]}@{slot['digest']}"


def refresh(name: str) -> None:
    """Ask docker for the digest behind the slot's tag, and write it with the date; comments stay."""
    slots = read()
    if name not in slots or slots[name]["tag"] is None:
        sys.exit(f"There is no slot {name} with a tag.")
    tag, platform = slots[name]["tag"], slots[name]["platform"]
    argv = ["docker", "buildx", "imagetools", "inspect", tag, "--format", "{{json .Manifest}}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"docker does not answer: {error}")
    if done.returncode:
        sys.exit(f"docker cannot inspect {tag}: {done.stderr.strip()}")
    digest = digest_of(json.loads(done.stdout), platform)
    if digest is None:
        sys.exit(f"{tag} has no image for {platform}.")
    write(name, digest, datetime.now(UTC).date().isoformat())
    print(f"{name}: {digest}")


def digest_of(manifest: dict[str, Any], platform: str) -> str | None:
    """Return the digest for a platform in a manifest list; a plain manifest's own."""
    entries = manifest.get("manifests")
    if not entries:
        return manifest.get("digest")
    for entry in entries:
        found = entry.get("platform", {})
        if f"{found.get('os')}/{found.get('architecture')}" == platform:
            return str(entry["digest"])
    return None


def write(name: str, digest: str, day: str) -> None:
    """Set a slot's two lines."""
    head, slot, rest = PINS.read_text(encoding="utf-8").partition(f"\n  {name}:\n")
    rest = re.sub(r"(\n    digest: ).*", rf"\g<1>{digest}", rest, count=1)
    rest = re.sub(r"(\n    refreshed: ).*", rf"\g<1>{day}", rest, count=1)
    PINS.write_text(f"{head}{slot}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
