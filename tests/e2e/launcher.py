"""``thor-spec`` beside other tests' engines: what those take and return of this machine's memory is not its business.

    python -m tests.e2e.launcher FOLDER ARGUMENTS...

The guard reads memory that stands still, from files in FOLDER. Engines compute in the process that schedules, unless
told otherwise, where vLLM would start a worker: the cores are few, and the one of the two that waits spins.
"""

import os
import sys
from pathlib import Path

from tests.guard.series import FakeProc
from thor_spec.cli.entry import main
from thor_spec.guard import guarded

if __name__ == "__main__":
    still = FakeProc(Path(sys.argv.pop(1)))
    guarded.Settings.__init__.__kwdefaults__["sources"] = still.sources
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sys.exit(main())
