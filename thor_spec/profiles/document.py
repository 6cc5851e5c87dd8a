"""A YAML file whose values know the line they stand on, so that an error can say it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from thor_spec.errors import ConfigError

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The content of one file, and the line of each value by its place in it."""

    path: Path
    content: Any
    lines: Mapping[Place, int]

    def where(self, place: Iterable[str | int]) -> str:
        """Return ``file:line: field``; the nearest line that exists, for a field that is missing."""
        wanted = tuple(place)
        near = next(wanted[:n] for n in range(len(wanted), -1, -1) if wanted[:n] in self.lines)
        field = ".".join(map(str, wanted)) or "the file"
        return f"{self.path}:{self.lines[near]}: {field}"

    def require(self, schema: Mapping[str, Any]) -> None:
        """Check against a JSON schema. Raises: ConfigError, with a line for each mistake, in the file's order."""
        validator = jsonschema.Draft202012Validator(schema)
        found = sorted(
            (self.where(error.absolute_path), _message(error)) for error in validator.iter_errors(self.content)
        )
        if found:
            raise ConfigError("\n".join(f"{where} {message}" for where, message in found))


def read(path: Path) -> Document:
    """Read one document. Raises: ConfigError: unreadable, not YAML, a field twice, or a key that is not plain text."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The profile {path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or error  # one line of several
        raise ConfigError(f"{line}: not YAML: {what}") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    lines: dict[Place, int] = {(): 1}
    try:
        if root is not None:
            _walk(path, root, (), lines)
    except RecursionError as error:
        raise _too_deep(path) from error
    return Document(path, content, lines)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"{path}: it is nested too deeply, or an alias stands within what it names. Write it out.")


def _walk(path: Path, node: yaml.Node, place: Place, lines: dict[Place, int]) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{path}:{line}: a key must be plain text.")
            inner = (*place, key.value)
            if inner in lines:
                raise ConfigError(f"{path}:{line}: {'.'.join(map(str, inner))} stands here twice.")
            lines[inner] = line
            _walk(path, value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(path, value, (*place, i), lines)


def _message(error: jsonschema.ValidationError) -> str:
    """Return a schema's complaint in our words where its own would dump the schema."""
    value: Any = error.instance
    rule: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        unknown = sorted(set(value) - set(schema.get("properties", {})))
        return f"has unknown fields: {', '.join(map(str, unknown))}."
    if error.validator == "required":
        return f"lacks {', '.join(name for name in rule if name not in value)}."
    if error.validator == "type":
        return f"must be {rule if isinstance(rule, str) else ' or '.join(rule)}, not {value!r:.60}."
    if error.validator == "enum":
        return f"must be one of {', '.join(map(str, rule))}, not {value!r:.60}."
    if error.validator == "pattern":
        return f"must match {rule}, which {value!r:.60} does not."
    return f"{error.message[:120]}."
