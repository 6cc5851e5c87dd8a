"""Whether the server's address can be had, asked before an engine is loaded for it."""

import errno
import socket

from thor_spec.errors import ConfigError


def require_free(host: str, port: int) -> None:
    """Bind the address and let it go. Raises: ConfigError: in use, not an address of this machine, or privileged."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host} names no address ({error.strerror}). Use 127.0.0.1, or an address of this machine."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(_refusal(host, port, error)) from error


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is in use by another program. Stop it, or take another --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for all of them."
    if error.errno == errno.EACCES:
        return f"Port {port} needs privileges that this user lacks. Take a --port of 1024 or more."
    return f"{host}:{port} cannot be bound ({error.strerror}). Take another --host or --port."
