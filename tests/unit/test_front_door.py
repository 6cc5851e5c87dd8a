"""What the middleware does to a body, and what it refuses."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.config import CACHED_CONTROLS, CONTROLS
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.front_door import FrontDoor, rewritten
from thor_spec.vllm_plugin.options import CONTROL_KEY, DENOISE_KEYS, REQUEST_KEYS, TREE_KEY

DEEP = b'{"thor_spec":' * 10_000 + b"1" + b"}" * 10_000
SERVER = Acceptance(rule="typical", eps=0.1, delta=0.2)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"thor_spec"', b'{"model": "x"}', b"\xff", DEEP])
def test_what_is_not_ours_passes_as_it_is(body: bytes) -> None:
    assert rewritten(body, SERVER) == (body, SERVER)


def test_a_rule_travels_in_the_extra_arguments() -> None:
    body = json.dumps(
        {"model": "x", "vllm_xargs": {"mine": 1}, "thor_spec": {"accept": "threshold", "accept_eps": 0.5}}
    )
    found, rule = rewritten(body.encode(), SERVER)
    extra = {"mine": 1, "thor_spec_accept": "threshold", "thor_spec_eps": 0.5}
    assert json.loads(found) == {"model": "x", "vllm_xargs": extra}
    assert rule == Acceptance(rule="threshold", eps=0.5, delta=0.2)


@pytest.mark.parametrize(
    "given", ["typical", {"accept": 3}, {"accept": "typical", "eps": 1}, [], False, {"accept_eps": 10**400}]
)
def test_a_wrong_rule_is_refused(given: object) -> None:
    with pytest.raises(ConfigError):
        rewritten(json.dumps({"thor_spec": given}).encode(), SERVER)


def test_nothing_is_what_clients_write_for_nothing() -> None:
    body = b'{"thor_spec": null}'
    assert rewritten(body, SERVER) == (body, SERVER)


@pytest.mark.parametrize("extra", [[1], "x", 3])
def test_extra_arguments_that_are_no_object_are_refused(extra: object) -> None:
    with pytest.raises(ConfigError, match="vllm_xargs must be an object"):
        rewritten(json.dumps({"vllm_xargs": extra, "thor_spec": {"accept": "exact"}}).encode(), SERVER)


def test_corruption_is_planted_only_where_the_server_allows_it() -> None:
    body = json.dumps({"thor_spec": {"control": "kv-rows"}}).encode()
    found, rule = rewritten(body, SERVER, controls=CONTROLS)
    assert json.loads(found) == {"vllm_xargs": {"thor_spec_control": "kv-rows"}}
    assert rule == SERVER
    with pytest.raises(ConfigError, match="no option control"):
        rewritten(body, SERVER)
    with pytest.raises(ConfigError, match="control='x' is not one of state-slot"):
        rewritten(json.dumps({"thor_spec": {"control": "x"}}).encode(), SERVER, controls=CONTROLS)


def test_a_cache_is_corrupted_only_under_a_salt() -> None:
    body = {"thor_spec": {"control": "cached-state"}}
    with pytest.raises(ConfigError, match="needs a cache_salt"):
        rewritten(json.dumps(body).encode(), SERVER, controls=CACHED_CONTROLS)
    found, _ = rewritten(json.dumps({**body, "cache_salt": "mine"}).encode(), SERVER, controls=CACHED_CONTROLS)
    assert json.loads(found)["vllm_xargs"] == {"thor_spec_control": "cached-state"}


def test_settings_of_blocks_travel_in_the_extra_arguments() -> None:
    given = {"mode": "2.0", "edit_threshold": None, "max_denoise_steps": 8}
    found, rule = rewritten(json.dumps({"thor_spec": given}).encode(), Denoising())
    extra = {"thor_spec_mode": "2.0", "thor_spec_edit_threshold": 1.0, "thor_spec_max_denoise_steps": 8}
    assert json.loads(found) == {"vllm_xargs": extra}
    assert rule == Denoising(threshold=0.95, edit_threshold=None, max_steps=8)
    names = {key.removeprefix("thor_spec_"): value for key, value in extra.items()}
    assert Denoising().of_request(names).described == rule.described  # what the engine makes of it


@pytest.mark.parametrize("given", ["speed", {"mode": "fast"}, {"accept": "typical"}, {"threshold": 2}])
def test_wrong_settings_of_blocks_are_refused(given: object) -> None:
    with pytest.raises(ConfigError):
        rewritten(json.dumps({"thor_spec": given}).encode(), Denoising())


@pytest.mark.parametrize("body", [{}, {"thor_spec": {"accept": "exact"}}, {"thor_spec": None}])
def test_the_engine_s_own_arguments_are_nobody_else_s(body: dict[str, Any]) -> None:
    for key in (*REQUEST_KEYS, *DENOISE_KEYS, CONTROL_KEY, TREE_KEY, "thor_spec_later"):
        with pytest.raises(ConfigError, match=f"vllm_xargs takes no {key}"):
            rewritten(json.dumps({**body, "vllm_xargs": {"mine": 1, key: "x"}}).encode(), SERVER)
        with pytest.raises(ConfigError, match=f"extra_args takes no {key}"):
            rewritten(json.dumps({**body, "sampling_params": {"extra_args": {key: "x"}}}).encode(), SERVER)


def asked(path: str, body: bytes, *, root: str = "", status: int | None = 200, **options: Any) -> Any:
    """Return the start of the answer, and what vLLM was given: None, where the door answered itself."""
    config = SimpleNamespace(
        additional_config={"thor_spec": options},
        model_config=SimpleNamespace(is_diffusion=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    app: Any = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    sent: list[Any] = []
    reached: list[bytes] = []

    async def vllm(_scope: Any, receive: Any, send: Any) -> None:
        reached.append((await receive())["body"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"{root}{path}", "root_path": root, "headers": []}
    asyncio.run(FrontDoor(vllm)({**scope, "app": app}, receive, send))
    return sent[0], reached[0] if reached else None


@pytest.mark.parametrize("root", ["", "/api"])
def test_requests_are_known_by_the_path_that_vllm_knows(root: str) -> None:
    """A server with --root-path puts that before each path."""
    start, reached = asked("/v1/completions", b'{"thor_spec": {"accept": "nonsense"}}', root=root)
    assert (start["status"], reached) == (400, None)


CARRIED = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations"]
NOT_CARRIED = ["/v1/chat/completions/batch", "/inference/v1/generate"]


@pytest.mark.parametrize("path", CARRIED + NOT_CARRIED)
def test_every_answer_says_which_rule_it_came_by(path: str) -> None:
    start, reached = asked(path, b"{}", accept="typical", accept_eps=0.09, accept_delta=0.3)
    assert reached == b"{}"
    assert start["headers"] == [(b"x-thor-spec-accept", b"typical eps=0.09 delta=0.3")]


@pytest.mark.parametrize("path", CARRIED + NOT_CARRIED)
def test_options_are_carried_or_refused_and_never_dropped(path: str) -> None:
    start, reached = asked(path, b'{"thor_spec": {"accept": "threshold"}}')
    if path in NOT_CARRIED:
        assert (start["status"], reached) == (400, None)
    else:
        assert json.loads(reached) == {"vllm_xargs": {"thor_spec_accept": "threshold"}}


def test_what_nests_too_deeply_is_left_to_vllm_to_refuse(tmp_path: Path) -> None:
    body = b'{"thor_spec": ' + b"[" * 100_000
    start, reached = asked("/v1/chat/completions", body, status=400, record=str(tmp_path / "r.jsonl"))
    assert (start["status"], reached) == (400, body)


def test_what_vllm_refuses_is_not_recorded(tmp_path: Path) -> None:
    """A replay would be refused there, too, and end."""
    file = tmp_path / "r.jsonl"
    for status, content in ((400, "refused"), (200, "answered"), (404, "refused")):
        body = {"messages": [{"role": "user", "content": content}], "thor_spec": {"accept": "exact"}}
        asked("/v1/chat/completions", json.dumps(body).encode(), status=status, record=str(file), record_contents=True)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"messages": [{"role": "user", "content": "answered"}]}
    ]
