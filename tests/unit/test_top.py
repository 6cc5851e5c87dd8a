"""``thor-spec top`` over a job and an engine that count up, through a pseudo-terminal and through a pipe."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thor_spec.serve.vitals import Sample, Vitals, between

# A launcher that holds the device, and an engine whose counters grow with each look.
JOB = """
import http.server, os, sys
from thor_spec.guard import identity
from thor_spec.guard.locks import ADMISSION, LockDirectory

looks = 0

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global looks
        looks += 1
        rows = [f"# TYPE vllm:{n} counter" + chr(10) + f"vllm:{n}_total {v}" for n, v in {
            "generation_tokens": 100 * looks, "spec_decode_num_drafts": 10 * looks,
            "spec_decode_num_accepted_tokens": 15 * looks, "prefix_cache_queries": 40 * looks,
            "prefix_cache_hits": 10 * looks}.items()]
        rows.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
        rows += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{p}"}} {n * looks}'
                 for p, n in enumerate((9, 6))]
        rows += ["# TYPE vllm:num_requests_running gauge", "vllm:num_requests_running 3",
                 "# TYPE vllm:num_requests_waiting gauge", "vllm:num_requests_waiting 1",
                 "# TYPE vllm:kv_cache_usage_perc gauge", "vllm:kv_cache_usage_perc 0.25"]
        self.send_response(200); self.end_headers()
        self.wfile.write(("\\n".join(rows) + "\\n").encode())
    def log_message(self, *args): pass

server = http.server.HTTPServer(("127.0.0.1", 0), Engine)
url = f"http://127.0.0.1:{server.server_port}"
facts = {"title": "serve \\x1b[31mnano", "url": url, "phase": "ready", "floor_bytes": 1 << 20}
named = identity.of_process(os.getpid(), uuid="u", **facts)
lock = LockDirectory.find().take(ADMISSION, named)
print("held", flush=True)
server.serve_forever()
"""
TOP = (sys.executable, "-m", "thor_spec", "top", "--interval", "0.2", "--count", "3")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def job(runtime: None) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "held\n"
        yield
        running.kill()


def on_a_terminal(argv: tuple[str, ...]) -> str:
    """Run the command on a pseudo-terminal of 100 columns and return what it wrote there."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=env) as running:
        os.close(follower)
        written = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # how a pseudo-terminal says that nobody is left
                break
            written += piece
        assert running.wait(30) == 0, written
    os.close(leader)
    return written.decode()


def test_on_a_terminal_it_is_a_live_view(job: None) -> None:
    written = on_a_terminal(TOP)
    assert "\x1b[1A" in written or "\x1b[2K" in written  # it goes back over its lines
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.rsplit("job", 1)[1])
    rows = dict(line.strip().split(None, 1) for line in f"job{last}".splitlines() if len(line.split()) > 1)
    assert rows["job"] == "serve ?[31mnano, ready"  # a title cannot colour the terminal
    assert float(rows["tok/s"]) > 100
    assert rows["tok/step"] == "2.50"
    assert rows["acceptance"] == "0.90 0.60"
    assert (rows["running"], rows["waiting"], rows["hits"]) == ("3", "1", "25%")
    assert rows["KV"] == f"25.0%  [{'#' * 6}{' ' * 18}]"
    assert rows["margin"].endswith("GiB")
    assert "[" in rows["available"]


def test_elsewhere_it_is_plain_lines(job: None) -> None:
    done = subprocess.run(TOP, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert done.stdout.count("\n") == 3
    assert "\x1b" not in done.stdout
    assert "tok/s -" in first  # one look is no speed
    assert "tok/step 2.50  acceptance 0.90 0.60  running 3  waiting 1  KV 25.0%  hits 25%" in last


def test_without_a_job_it_shows_the_board(runtime: None) -> None:
    done = subprocess.run([*TOP[:-1], "1"], capture_output=True, text=True, check=True)
    assert "job free  tok/s -" in done.stdout
    assert re.search(r"available \d+\.\d\d GiB", done.stdout)


def test_ctrl_c_ends_it_quietly(runtime: None) -> None:
    leader, follower = pty.openpty()
    argv = TOP[:-2]  # without a count
    with subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, start_new_session=True) as running:
        os.close(follower)
        try:
            while b"job" not in os.read(leader, 65536):
                pass
            running.send_signal(2)
            rest = b""
            with contextlib.suppress(OSError):
                while piece := os.read(leader, 65536):
                    rest += piece
            assert running.wait(30) == 0
            assert b"Traceback" not in rest
        finally:
            running.kill()  # else a test that fails would wait for it
            os.close(leader)


def sample(at_s: float, **totals: float) -> Sample:
    return Sample(at_s, {f"vllm:{name}": value for name, value in totals.items()}, {})


def test_vitals_of_one_answer_have_no_speed() -> None:
    assert between(None, sample(1.0, num_requests_running=2.0)) == Vitals(running=2)


def test_an_engine_that_restarted_is_not_slow_but_unknown() -> None:
    found = between(sample(1.0, generation_tokens_total=500), sample(2.0, generation_tokens_total=3))
    assert found.tokens_per_s is None


def test_no_drafts_is_not_no_acceptance() -> None:
    names = {"spec_decode_num_drafts_total": 7.0, "spec_decode_num_accepted_tokens_total": 9.0}
    found = between(sample(1.0, **names), sample(2.0, **names))
    assert (found.tokens_per_step, found.acceptance) == (None, ())
