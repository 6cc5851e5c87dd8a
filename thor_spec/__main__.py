"""``python -m thor_spec`` is ``thor-spec``."""

from thor_spec.cli.entry import main

main()
