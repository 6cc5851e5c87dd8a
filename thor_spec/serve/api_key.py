"""The key that clients of the API must show, and who may be listened to without one."""

import ipaddress
import os
import stat
from pathlib import Path

from thor_spec import env
from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.gate import KEY_VARIABLE as VARIABLE

LEAST_CHARACTERS = 16
_LOGGING = ("--enable-log-requests", "--enable-log-outputs", "--enable-log-deltas")


def read(config: ServeConfig) -> str | None:
    """Return the key, or None where none is asked for. Without an option, vLLM's own variable counts.

    Raises: ConfigError: a file that others may read, a key that is too short, or an open address without a key.
    """
    key = config.api_key if config.api_key_file is None else _from_file(config.api_key_file)
    if key is None:
        key = env.engine_variable(VARIABLE)
    if key is not None and (len(key) < LEAST_CHARACTERS or not (key.isascii() and key.isprintable()) or " " in key):
        raise ConfigError(
            f"The API key must have {LEAST_CHARACTERS} or more printable ASCII characters without blanks. "
            "Make one with `openssl rand -hex 32`."
        )
    if key is None and not is_loopback(config.host) and not config.insecure:
        raise ConfigError(
            f"--host {config.host} lets other machines use the model, and there is no key. Give --api-key-file FILE "
            "(mode 0600), or --insecure if the network is yours alone."
        )
    return key


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_discreet(config: ServeConfig, flags: set[str]) -> None:
    """Refuse arguments of vLLM that put a key into its argv, or prompts into its log. Raises: ConfigError.

    Args:
        flags: what is passed to vLLM, in dashed form.
    """
    if "--api-key" in flags:
        raise ConfigError("--api-key after -- would stand in the engine's argv. Give it before --, or --api-key-file.")
    if not config.insecure and (written := sorted(flags & set(_LOGGING))):
        raise ConfigError(
            f"{', '.join(written)} would write prompts or answers to the log. Leave it out, or add --insecure."
        )


def _from_file(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not be waited for
        with open(fd, encoding="utf-8") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError(f"--api-key-file {path} is not a plain file.")
            if info.st_mode & 0o077:
                raise ConfigError(
                    f"--api-key-file {path} may be read by others (mode {stat.S_IMODE(info.st_mode):04o}). "
                    f"`chmod 600 {path}`."
                )
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read ({getattr(error, 'strerror', error)}).") from error
    lines = text.split("\n")
    if len(lines) > 2 or any(lines[1:]):
        raise ConfigError(f"--api-key-file {path} must hold one line, the key.")
    return lines[0].strip()
