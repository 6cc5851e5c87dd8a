"""Whether an engine answers, for a container's health check: one token, not ``/health``, which answers over a hung one.

    python3 -m thor_spec.serve.healthcheck [URL]

Exit status 0, or 1 with a line that says why. The key comes from ``VLLM_API_KEY``, as the engine's does.
"""

import sys

import httpx

from thor_spec import env
from thor_spec.errors import CanaryError
from thor_spec.serve import canary
from thor_spec.vllm_plugin.gate import KEY_VARIABLE

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0


def check(url: str, api_key: str | None) -> None:
    """Ask the first model that is served for a token. Raises: CanaryError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT_S)
        model = str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CanaryError(f"{url}/v1/models does not name a model: {error or type(error).__name__}.") from error
    if len(canary.probe(url, model, tokens=1, timeout_s=TIMEOUT_S, api_key=api_key)) != 1:
        raise CanaryError("One token was asked for, and none came.")


def main(arguments: list[str]) -> int:
    """Check; return an exit status."""
    try:
        check(arguments[0] if arguments else URL, env.engine_variable(KEY_VARIABLE))
    except CanaryError as error:
        sys.stderr.write(f"thor-spec: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
