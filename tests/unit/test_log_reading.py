from pathlib import Path
from types import SimpleNamespace

import pytest

from thor_spec.errors import ConfigError
from thor_spec.serve import failure, log
from thor_spec.serve.failure import first_odd_line
from thor_spec.serve.log import Tail
from thor_spec.serve.metrics import KVCapacity, kv_capacity, totals
from thor_spec.serve.phases import Phase, phase_begun

W = "(Worker pid=7) ERROR 11-29 20:05:59 [multiproc_executor.py:1063] "
DEAD_WORKER = [
    "/lib/api_server.py:24: DeprecationWarning: `vllm.entrypoints.openai.api_server` is deprecated",
    "(APIServer pid=5) WARNING 11-29 20:05:29 [system_utils.py:255] This can cause errors like `OSError: [Errno 24]`",
    W + "WorkerProc hit an exception.",
    W + "Traceback (most recent call last):",
    W + '  File "gdn_attention.py", line 556, in _spec_forward',
    W + "    B.copy_(new_B)",
    W + "RuntimeError: The size of tensor a (10) must match the size of tensor b (9)",
    "(EngineCore pid=6) ERROR 11-29 20:05:59 [core.py:9] EngineCore encountered a fatal error.",
    "Traceback (most recent call last):",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
]


def test_the_cause_wins_over_its_echoes() -> None:
    assert first_odd_line(DEAD_WORKER) == "RuntimeError: The size of tensor a (10) must match the size of tensor b (9)"


@pytest.mark.parametrize(
    "line",
    [
        "ptxas fatal   : Value 'sm_110a' is not defined for option 'gpu-name'",
        "api_server.py: error: argument --port: invalid int value: 'x'",
        "ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less than desired",
        "Fatal Python error: Segmentation fault",
        "kernel: NVRM: NV_ERR_NO_MEMORY",
    ],
)
def test_known_causes(line: str) -> None:
    assert first_odd_line(["INFO 11-29 20:00:00 [a.py:1] fine", line, "RuntimeError: later"]) == line


def test_what_torch_puts_before_a_line_is_no_part_of_it() -> None:
    dead = [
        "(MainProcess pid=969) INFO 11-30 18:32:16 [gpu_worker.py:772] Available KV cache memory: -66.5 GiB",
        '[rank0]:   File "kv_cache_planning.py", line 57, in _check_enough_kv_cache_memory',
        "[rank0]:     raise ValueError(",
        "[rank0]: ValueError: No available memory for the cache blocks.",
        "[rank0]:[W1130 18:32:11.643 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called",
    ]
    assert first_odd_line(dead) == "ValueError: No available memory for the cache blocks."


def test_a_logged_error_serves_when_nothing_better_is_there() -> None:
    assert first_odd_line(["INFO 1", "ERROR 11-29 20:00:00 [a.py:1] no such layer"]) == "no such layer"
    assert first_odd_line(["INFO 1", "all fine"]) is None


def test_phases_go_forward_only() -> None:
    lines = [
        ("(Worker pid=1) INFO Loading model from scratch...", Phase.WEIGHTS),
        ("INFO Model loading took 0.01 GiB memory and 2.8 seconds", Phase.PROFILE),
        ("INFO Dynamo bytecode transform time: 3.1 s", Phase.COMPILE),
        ("Capturing CUDA graphs (decode, FULL): 10%", Phase.CAPTURE),
        ("INFO Model loading took 0.01 GiB memory and 2.8 seconds", None),
        ("INFO init engine (profile, create kv cache, warmup model) took 2.9 s", Phase.SERVER),
    ]
    current = Phase.START
    for line, expected in lines:
        assert phase_begun(line, current) is expected
        current = expected or current


def test_tail_gives_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    tail = Tail(path)
    with path.open("a") as log:
        log.write("one\ntw")
        log.flush()
        assert list(tail.new_lines()) == ["one"]
        log.write("o\n10%\r20%\r")
        log.flush()
        assert list(tail.new_lines()) == ["two", "10%", "20%"]
    assert "before" not in tail.all_lines()


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total drafts
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 4.0
# HELP vllm:cache_config_info x
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{kv_cache_max_concurrency="9.91",kv_cache_size_tokens="324720"} 1.0
"""


def test_metrics() -> None:
    assert totals(METRICS)["vllm:spec_decode_num_drafts_total"] == 7
    assert kv_capacity(METRICS) == KVCapacity(tokens=324720, sequences=9.91)
    assert kv_capacity(METRICS.replace("324720", "None")) is None


def test_a_log_without_a_cause_says_whether_there_was_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log.open_path(tmp_path / "engine.log")
    assert failure.cause(["fine"], path) == "its log shows no error"
    monkeypatch.setattr(log.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    silent = failure.cause(["fine"], path)
    assert "no space left" in silent
    assert "--log-file" in failure.remedy(silent)
    assert failure.cause(["RuntimeError: why"], path) == "RuntimeError: why"
    with pytest.raises(ConfigError, match=r"No space left on device.*--log-file"):
        log.open_path(path)
    assert not log.is_full(Path("/dev/null"))
