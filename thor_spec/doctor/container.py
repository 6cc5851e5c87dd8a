"""The container this runs in: what it was built on, what was changed since, and how it is shut."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from thor_spec import sysfs
from thor_spec.doctor import overlay
from thor_spec.doctor.report import Check, Level, Report
from thor_spec.guard import entrypoint
from thor_spec.guard.container_spec import is_by_digest

_SHOWN = 5


def examine(manifest: Path = Path(overlay.MANIFEST), root: Path = Path("/")) -> Report:
    """Check the container from inside."""
    return Report(checks=(*check_overlay(manifest), *_user(), *_root_file_system(root), *_lock(root)))


def check_image(image: str) -> Iterator[Check]:
    """Yield whether an image is named by digest."""
    good = is_by_digest(image)
    yield Check(
        name="image",
        level=Level.OK if good else Level.FAIL,
        detail=image if good else f"{image} is a tag, which may point to another build tomorrow",
        remedy="" if good else "Name it by digest: deploy/pins.yaml says how to find it.",
    )


def check_overlay(manifest: Path) -> Iterator[Check]:
    """Yield what the image was built on, and each kind of difference from it with a few names."""
    text = sysfs.text(manifest)
    if text is None:
        yield Check(
            name="image",
            level=Level.FAIL,
            detail=f"{manifest} is missing: this is no image of deploy/Containerfile",
            remedy="Build with deploy/Containerfile, or leave --container out.",
        )
        return
    try:
        content = json.loads(text)
        differences = overlay.compare(content)
    except (ValueError, AttributeError) as error:
        remedy = "Build the image again."
        yield Check(name="image", level=Level.FAIL, detail=f"{manifest} is malformed: {error}", remedy=remedy)
        return
    yield from check_image(str(content.get("base", "?")))
    if not differences:
        yield Check(name="overlay", level=Level.OK, detail=f"the base's {len(content['files'])} files are as they were")
    for how in ("changed", "removed", "added"):
        names = [difference.path for difference in differences if difference.how == how]
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield Check(
                name="overlay",
                level=Level.OK if how == "added" else Level.WARN,
                detail=f"{len(names)} files {how}: {', '.join(names[:_SHOWN])}{more}",
                remedy="" if how == "added" else "The build replaced what the base was tested with. Is that meant?",
            )


def _user() -> Iterator[Check]:
    root = os.getuid() == 0
    yield Check(
        name="user",
        level=Level.WARN if root else Level.OK,
        detail=f"uid {os.getuid()}",
        remedy="Run as another user: --user, or the image's own." if root else "",
    )


def _root_file_system(root: Path) -> Iterator[Check]:
    options = mount_options(sysfs.text(root / "proc" / "self" / "mountinfo") or "", "/")
    read_only = "ro" in options
    yield Check(
        name="root",
        level=Level.OK if read_only else Level.WARN,
        detail="read-only" if read_only else "writable",
        remedy="" if read_only else "Start with --read-only and a tmpfs for /tmp, as deploy/compose.yaml does.",
    )


def mount_options(mountinfo: str, target: str) -> tuple[str, ...]:
    """Return the options of the last mount on ``target``. Source: proc_pid_mountinfo(5)."""
    rows = [line.split() for line in mountinfo.splitlines()]
    found = [row[5].split(",") for row in rows if len(row) > 5 and row[4] == target]
    return tuple(found[-1]) if found else ()


def _lock(root: Path) -> Iterator[Check]:
    path = root / entrypoint.LOCK.lstrip("/")
    there = path.is_file()
    yield Check(
        name="residency",
        level=Level.OK if there else Level.FAIL,
        detail=f"{entrypoint.LOCK} is {'mounted' if there else 'missing'}",
        remedy=""
        if there
        else "Two jobs could share the device. Mount the host's /run/lock/thor-spec/residency there.",
    )
