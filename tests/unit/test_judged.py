"""Which gates ``thor-spec verify all`` can ask of what."""

import contextlib
from typing import Any

import pytest

from thor_spec.cli.judged import Servers

FLAGS: dict[str, Any] = {
    "model": "tiny-hybrid", "draft": None, "draft_tokens": None, "context": 2048, "kv_cache_memory": 1 << 28,
}  # fmt: skip


def test_an_engine_of_our_own_is_asked_everything() -> None:
    assert Servers(FLAGS, None, (), url=None).left_out() == {}


@pytest.mark.parametrize("changes", [{"draft": "none"}, {"model": "nano-llada"}])
def test_trees_take_a_hybrid_with_a_drafter(changes: dict[str, Any]) -> None:
    assert list(Servers({**FLAGS, **changes}, None, (), url=None).left_out()) == ["tree"]


@pytest.mark.parametrize(("caches", "without"), [(True, "controls"), (False, "prefix-cache")])
def test_a_running_server_cannot_be_asked_everything(
    monkeypatch: pytest.MonkeyPatch, caches: bool, without: str
) -> None:
    monkeypatch.setattr("thor_spec.gates.prefix_cache.caches", lambda _: caches)
    monkeypatch.setattr("thor_spec.serve.client.Server", contextlib.nullcontext)
    servers = Servers({**FLAGS, "model": None, "kv_cache_memory": None}, None, (), url="http://127.0.0.1:1")
    assert list(servers.left_out()) == [without, "tree"]
