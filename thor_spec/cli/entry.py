"""Where a command line begins: the full parser, except for a plain ``status``, which is asked for in loops."""

import sys

from thor_spec.errors import ThorSpecError

_STATUS_FLAGS = {"--json", "--last"}


def main() -> None:
    """Run one command and exit, as ``thor_spec.cli.main.main`` does."""
    name, *flags = sys.argv[1:] or [""]
    if name != "status" or not set(flags) <= _STATUS_FLAGS:
        from thor_spec.cli.main import main as parse

        parse()
        return
    from thor_spec.cli.look import show_status

    try:
        show_status(as_json="--json" in flags, last="--last" in flags)
    except ThorSpecError as error:
        print(f"thor-spec: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
