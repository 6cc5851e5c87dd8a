"""From a model name to a server that has proved itself: check, start, watch the phases, canary, stop."""
