"""Where a command line begins: the full parser, except for a plain ``status``, which is asked for in loops."""

import errno
import os
import sys

from thor_spec.cli.notes import note
from thor_spec.errors import ThorSpecError

_STATUS_FLAGS = {"--json", "--last"}


def main() -> None:
    """Run one command and exit, as ``thor_spec.cli.main.main`` does; output that nobody takes any more ends it, too."""
    try:
        try:
            _run()
        finally:
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries the same again at its end
        if error.errno != errno.EPIPE:
            note(f"thor-spec: What this command prints cannot be written ({error.strerror}).")
        sys.exit(1)


def _run() -> None:
    name, *flags = sys.argv[1:] or [""]
    if name != "status" or not set(flags) <= _STATUS_FLAGS:
        from thor_spec.cli.main import main as parse

        parse()
        return
    from thor_spec.cli.look import show_status

    try:
        show_status(as_json="--json" in flags, last="--last" in flags)
    except ThorSpecError as error:
        note(f"thor-spec: {error}")
        sys.exit(error.exit_code)
