"""vLLM's API server, imported without looking for garbage: a fifth of the time, and what is imported is none.

What vLLM spawns imports this module as well. ``activation``, which each of its processes runs, ends it.
"""

import gc
import runpy
import sys
from importlib.util import find_spec

from thor_spec.vllm_plugin import compat

gc.disable()

if __name__ == "__main__":
    found = find_spec(compat.API_SERVER)
    sys.argv[0] = str(found.origin if found else compat.API_SERVER)  # what messages about arguments begin with
    runpy.run_module(compat.API_SERVER, run_name="__main__")
