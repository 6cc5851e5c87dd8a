"""Speculation changes no greedy token, but at ties: the gate, over servers that run and over engines it starts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.served import ROOT, Served, command


def thor_spec(*args: str, runtime: Path) -> tuple[int, dict[str, Any], str]:
    """Run a command; return its exit status, what it printed as JSON, and its stderr."""
    env = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(runtime)}
    run = [*command(runtime), *args, "--json"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=env)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def require_green(code: int, printed: dict[str, Any], errors: str) -> dict[str, Any]:
    assert code == 0, errors
    (verdict,) = printed["verdicts"]
    assert verdict["passed"]
    assert verdict["figures"]["accepted_drafts"] > 0
    assert verdict["figures"]["equal_before_difference"]["plain"] >= 0.7 * verdict["figures"]["tokens"]
    print(verdict["summary"], *verdict["findings"], sep="\n  ")
    figures: dict[str, Any] = verdict["figures"]
    return figures


def test_a_hybrid_over_running_servers(hybrid: Served, tmp_path: Path) -> None:
    # Without prefix caching, which serve leaves off with a drafter: it keeps states in another mode.
    args = ("--no-enable-prefix-caching", "--max-logprobs", "-1", "--logprobs-mode", "raw_logits")
    size = ("--context", "2048", "--kv-cache-memory", "256MiB")
    runtime = tmp_path / "locks"  # beside the session's server, which holds the usual ones
    with Served(tmp_path / "plain", "tiny-hybrid", "--draft", "none", *size, "--", *args, runtime=runtime) as plain:
        plain.wait_ready()
        out = tmp_path / "record"
        urls = ("--url", hybrid.url, "--reference-url", plain.url)
        found = thor_spec("verify", "lossless", *urls, "--out", str(out), runtime=runtime)
        figures = require_green(*found)
        assert (figures["answers"], figures["tokens"]) == (20, 1280)
        assert plain.metric("vllm:spec_decode_num_drafts_total") == 0
        record = json.loads((out / "record.json").read_text())
        assert (record["name"], record["passed"]) == ("verify-lossless", True)
        # What does not speculate cannot be judged.
        code, _, errors = thor_spec("verify", "lossless", "--url", plain.url, runtime=runtime)
        assert code == 2
        assert "does not speculate" in errors
        assert plain.stop() == 0


@pytest.mark.timeout(400)
def test_a_dense_model_in_engines_of_its_own(tmp_path: Path) -> None:
    size = ("--kv-cache-memory", "256MiB", "--out", str(tmp_path / "record"))
    found = thor_spec("verify", "lossless", "tiny-dense", *size, runtime=tmp_path / "locks")
    require_green(*found)
    assert "stopping" not in found[2]  # the end of the work is no interruption
    assert not list((tmp_path / "locks").glob("receipts-*"))
