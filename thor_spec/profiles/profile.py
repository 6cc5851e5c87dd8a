"""One profile: how to serve a model, and where each value comes from."""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thor_spec.errors import ConfigError
from thor_spec.profiles.document import Document, read
from thor_spec.sizes import SIZES, parse_size

_FLAGS = {
    "attention_backend": "--attention-backend",
    "moe_backend": "--moe-backend",
    "kv_dtype": "--kv-cache-dtype",
    "load_format": "--load-format",
    "gpu_memory_utilization": "--gpu-memory-utilization",
}


class Value(NamedTuple):
    """One value with its origin. ``confidence``: several or one source, unverified, our design, or measured by us."""

    field: str
    value: Any
    confidence: str
    source: str


@dataclass(frozen=True, slots=True)
class Profile:
    """A validated profile file."""

    document: Document

    @property
    def path(self) -> Path:
        """Return the file."""
        return self.document.path

    @property
    def name(self) -> str:
        """Return the name that ``--profile`` takes."""
        return str(self._content["name"])

    @property
    def title(self) -> str:
        """Return a line for people."""
        return str(self._content["title"])

    @property
    def _content(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self.document.content
        return content

    def options(self) -> dict[str, Any]:
        """Return the options of ``thor-spec serve``, by field name of ``ServeConfig``."""
        found = {name: entry["value"] for name, entry in self._content["serve"].items()}
        found |= {name: parse_size(str(found[name])) for name in SIZES if name in found}
        engine = self._content.get("engine", {})
        arguments = [part for name, flag in _FLAGS.items() if name in engine for part in (flag, engine[name]["value"])]
        arguments += [part for entry in engine.get("arguments", ()) for part in entry["value"]]
        if arguments:
            found["vllm_args"] = tuple(map(str, arguments))
        if environment := {name: entry["value"] for name, entry in self._content.get("environment", {}).items()}:
            found["environment"] = environment
        return found

    def shape(self, which: str) -> Mapping[str, Any] | None:
        """Return the ``config.json`` fields of ``target`` or ``drafter`` for the memory plan; None where unknown."""
        entry = self._content.get("plan", {}).get(which)
        return entry["config"] if entry else None

    def kv_dtype(self) -> str:
        """Return the cache's dtype; ``auto`` follows the model."""
        return str(self._content.get("engine", {}).get("kv_dtype", {}).get("value", "auto"))

    def values(self) -> Iterator[Value]:
        """Yield every value with its origin, in the file's order."""
        for section in ("image", "serve", "engine", "environment", "plan", "measured"):
            yield from _values(section, self._content.get(section))


def _values(field: str, entry: object) -> Iterator[Value]:
    if isinstance(entry, list):
        for i, item in enumerate(entry):
            yield from _values(str(item.get("what", f"{field}.{i}")) if isinstance(item, dict) else field, item)
    elif isinstance(entry, dict) and "confidence" in entry:
        value = entry.get("value", "from its config.json" if "config" in entry else None)
        yield Value(field, value, entry["confidence"], entry["source"])
    elif isinstance(entry, dict):
        for name, inner in entry.items():
            yield from _values(f"{field}.{name}", inner)


def load(path: Path) -> Profile:
    """Read and validate a profile. Raises: ConfigError, with file, line and field of each mistake."""
    document = read(path)
    document.require(_schema())
    if path.stem != document.content["name"]:
        raise ConfigError(f"{document.where(['name'])} must be {path.stem!r}, as the file is called.")
    return Profile(document)


@functools.cache
def _schema() -> Mapping[str, Any]:
    schema: Mapping[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return schema
