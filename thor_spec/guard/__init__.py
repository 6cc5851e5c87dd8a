"""One job on the device at a time, and nothing left behind when it ends. Imports neither torch nor vLLM."""
