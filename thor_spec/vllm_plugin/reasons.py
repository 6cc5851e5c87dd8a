"""Why requests reused no more of the prefix cache than they did, as a running server tells it."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

REASONS = {
    "hit": "everything that could be reused was",
    "short": "the request is shorter than a block",
    "first": "no earlier request began with the same block: another system prompt, tools, or cache salt",
    "new": "its beginning was reused, and what follows was never asked before",
    "state": "the attention cache is there, but no recurrent state was kept at that boundary",
    "gone": "asked before and not there: evicted, or still being computed by another request",
}
COUNTED = {
    "requests": "Requests by why they reused no more.",
    "prompt_tokens": "Their tokens.",
    "reused_tokens": "Those of them that came from the prefix cache.",
}
PREFIX = "thor_spec:prefix_cache_"
TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a server says about its prefix cache."""

    block: int
    """Tokens between two places where a request can go on; 0 where the cache is off."""
    counts: Mapping[str, tuple[int, int, int]]
    """Requests, their tokens and the reused ones by reason."""

    @property
    def requests(self) -> int:
        """All requests."""
        return sum(row[0] for row in self.counts.values())

    @property
    def share(self) -> float:
        """Reused part of all tokens."""
        return sum(row[2] for row in self.counts.values()) / max(1, sum(row[1] for row in self.counts.values()))


def read(text: str) -> Told:
    """Read the text of ``/metrics``. Raises: ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {name: dict.fromkeys(COUNTED, 0) for name in REASONS}
    block = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counted = sample.name.removeprefix(PREFIX).removesuffix("_total")
            if sample.name.startswith(PREFIX) and counted in COUNTED and sample.labels.get("reason") in found:
                found[sample.labels["reason"]][counted] += int(sample.value)
            elif sample.name.startswith("vllm:cache_config") and sample.labels.get("enable_prefix_caching") == "True":
                block = int(sample.labels.get("block_size", "0"))
    counts = {name: (row["requests"], row["prompt_tokens"], row["reused_tokens"]) for name, row in found.items()}
    return Told(block=block, counts=counts)


def ask(url: str) -> Told | None:
    """Ask a server; None where none answers."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return read(connection.getresponse().read().decode(errors="replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
