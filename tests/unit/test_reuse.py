"""Why a request reused no more than it did."""

from pathlib import Path

from thor_spec.doctor import prefix_cache
from thor_spec.doctor.report import Level
from thor_spec.vllm_plugin import reasons, reuse
from thor_spec.vllm_plugin.reuse import Account


def add(account: Account, hashes: list[str], tokens: int, reused: int, *, stateless: bool = False) -> str:
    return account.add(hashes=hashes, block=10, hashed=10, tokens=tokens, reused=reused, stateless=stateless)


def test_reasons(tmp_path: Path) -> None:
    account = Account(tmp_path / "1.reuse.npy")
    assert add(account, [], 9, 0) == "short"
    assert add(account, ["a", "b"], 25, 0) == "first"
    assert add(account, ["a", "b"], 25, 20) == "hit"
    assert add(account, ["a", "b"], 20, 10) == "hit"  # the last token is always computed
    assert add(account, ["a", "c"], 25, 10) == "new"
    assert add(account, ["a", "d"], 25, 0, stateless=True) == "state"
    assert add(account, ["a", "b"], 25, 0) == "gone"
    assert add(account, ["z"], 15, 0) == "first"
    counted = reuse.by_reason(tmp_path)
    assert counted["first"] == (2, 40, 0)
    assert counted["hit"] == (2, 45, 30)
    assert sum(row[0] for row in counted.values()) == 8


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: object) -> None:
    monkeypatch.setattr(reuse, "REMEMBERED", 2)  # type: ignore[attr-defined]
    account = Account(None)
    for name in "abc":
        add(account, [name], 15, 0)
    assert add(account, ["a"], 15, 0) == "first"
    assert add(account, ["c"], 15, 0) == "gone"


METRICS = """
# TYPE thor_spec:prefix_cache_requests counter
thor_spec:prefix_cache_requests_total{reason="short"} 30
thor_spec:prefix_cache_requests_total{reason="hit"} 10
# TYPE thor_spec:prefix_cache_prompt_tokens counter
thor_spec:prefix_cache_prompt_tokens_total{reason="short"} 3000
thor_spec:prefix_cache_prompt_tokens_total{reason="hit"} 5000
# TYPE thor_spec:prefix_cache_reused_tokens counter
thor_spec:prefix_cache_reused_tokens_total{reason="hit"} 4000
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="256",enable_prefix_caching="True"} 1
"""


def test_what_a_server_tells() -> None:
    told = reasons.read(METRICS)
    assert (told.block, told.requests, told.share) == (256, 40, 0.5)
    assert told.counts["short"] == (30, 3000, 0)
    assert reasons.read(METRICS.replace('"True"', '"False"')).block == 0
    assert reasons.ask("http://127.0.0.1:9") is None


def test_doctor_warns_of_blocks_that_are_too_long() -> None:
    (check,) = prefix_cache.check(reasons.read(METRICS))
    assert check.level is Level.WARN
    assert "30 of 40 requests are shorter than a block of 256 tokens" in check.detail
    (check,) = prefix_cache.check(reasons.read(METRICS.replace(" 30", " 3")))
    assert check.level is Level.OK
    assert not list(prefix_cache.check(None))
