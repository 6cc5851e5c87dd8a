"""Records for reports."""

from pathlib import Path

import pytest

from tests.unit.bench_outcomes import outcome, written
from thor_spec import record
from thor_spec.bench import quality
from thor_spec.gates.verdict import Verdict


@pytest.fixture
def records(tmp_path: Path) -> list[record.Record]:
    made = outcome()
    made.quality = {
        "exact": quality.Quality(answers=4, parses=0.5, passes=0.25, perplexity=3.1, distinct=(0.4, 0.8, 0.9))
    }
    written(tmp_path, "bench-chat", made.as_dict())
    point = {"output_throughput": 10.0, "median_tpot_ms": 3.0, "median_ttft_ms": 20.0, "completed": 4, "failed": 0}
    points = [{"concurrency": c, "request_rate": None, "result": point} for c in (1, 2)]
    written(tmp_path, "bench-serving", {"points": points, "refused": []})
    verdict = Verdict(gate="lossless", passed=False, summary="<b>3 wrong</b> & more")
    written(tmp_path, "verify-lossless", {"verdicts": [verdict.as_dict()]})
    written(tmp_path, "guard", {"seconds": 3.5})
    return record.find(tmp_path)
