from collections.abc import Iterator

import openai
import pytest

from tests.e2e.served import Served


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny hybrid with its drafter; requests may ask for corruption."""
    size = ("--context", "2048", "--draft-tokens", "7", "--kv-cache-memory", "256MiB")
    logits = ("--logprobs-mode", "raw_logits", "--max-logprobs", "-1")
    options = (*size, "--canary", "full", "--allow-controls", "--", *logits)
    with Served(tmp_path_factory.mktemp("hybrid"), "tiny-hybrid", *options) as served:
        yield served.wait_ready()
        assert served.stop() == 0


@pytest.fixture(scope="session")
def client(hybrid: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hybrid.url}/v1", api_key="none", max_retries=0)
