"""``python -m thor_spec`` is ``thor-spec``."""

from thor_spec.cli.main import main

main()
