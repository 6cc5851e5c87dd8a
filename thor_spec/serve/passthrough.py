"""Arguments that go to vLLM untouched, read only far enough to find contradictions with ours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thor_spec import json_text
from thor_spec.errors import ConfigError

_JSON_FLAGS = frozenset(
    {
        "--additional-config",
        "--attention-config",
        "--compilation-config",
        "--default-chat-template-kwargs",
        "--hf-overrides",
        "--kv-transfer-config",
        "--limit-mm-per-prompt",
        "--override-generation-config",
        "--speculative-config",
        "--structured-outputs-config",
    }
)


def flags(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag of ``args`` in its dashed form with its value; None where it has none."""
    for i, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        name, has_value, value = arg.partition("=")
        follows = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else None
        yield name.replace("_", "-"), value if has_value else follows


def mentions(args: Sequence[str], *names: str) -> bool:
    """Return whether ``args`` sets one of ``names``, their negations, or a field of theirs (``--name.field``)."""
    wanted = {form for name in names for form in (name, name.replace("--", "--no-", 1))}
    return any(flag.partition(".")[0] in wanted for flag, _ in flags(args))


def require_no_contradiction(ours: Mapping[str, str], args: Sequence[str], options: Mapping[str, str]) -> None:
    """Check ``args`` against the flags that thor-spec sets itself.

    Args:
        ours: vLLM flag -> the value we pass.
        options: vLLM flag -> the option of ours that sets it.

    Raises: ConfigError, on a flag of ours with another value, and on malformed JSON.
    """
    for flag, value in flags(args):
        base = flag.partition(".")[0]
        if base in _JSON_FLAGS and base == flag:
            require_json(flag, value)
        if base not in ours or base == "--additional-config":
            continue
        if flag != base or value != ours[base]:
            raise ConfigError(
                f"{flag} {value or ''} after -- contradicts {base} {ours[base]}, which thor-spec sets. "
                f"Use {options.get(base, 'no such argument')} instead."
            )


def require_json(flag: str, value: str | None) -> Any:
    """Return ``value`` parsed. Raises: ConfigError, showing where the JSON breaks."""
    try:
        return json_text.loads(value or "")
    except ValueError as error:
        raise ConfigError(
            f"{flag} needs JSON, and {value!r} is not: {error}. Quote it for the shell in '…'."
        ) from error


def take_json(flag: str, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the object that ``args`` passes for ``flag``, and ``args`` without it; vLLM takes only the last one.
    Raises: ConfigError, when it is malformed.
    """
    found: list[Any] = []
    rest: list[str] = []
    skip = False
    for i, arg in enumerate(args):
        if skip:
            skip = False
            continue
        name, has_value, value = arg.partition("=")
        if name.replace("_", "-") != flag:
            rest.append(arg)
            continue
        if not has_value:
            value, skip = (args[i + 1] if i + 1 < len(args) else ""), True
        found.append(require_json(flag, value))
    if not all(isinstance(content, dict) for content in found):
        raise ConfigError(f"{flag} needs a JSON object.")
    return {key: value for content in found for key, value in content.items()}, rest


def merged_additional_config(ours: Mapping[str, Any], args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Merge a passed ``--additional-config`` with ours, since vLLM takes only the last one.

    Returns: the merged object, and ``args`` without the flag.
    Raises: ConfigError, when it is malformed or sets our own key.
    """
    passed, rest = take_json("--additional-config", args)
    if clash := sorted(set(passed) & set(ours)):
        raise ConfigError(f"--additional-config sets {', '.join(clash)}, which thor-spec sets itself. Leave it out.")
    return {**ours, **passed}, rest
