"""The default configurations compile for both architectures without a GPU: they fit, and nothing spills.

What only a compiler decides is looked at here as well: whether replay sums in vLLM's order.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HAS_GPU
from thor_spec.device import ptxas

ROOT = Path(__file__).parent.parent.parent
SHARED_BYTES = 227 * 1024


def compiled(arch: int, only: str) -> list[dict[str, Any]]:
    """Compile in a process of its own: here Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "tools/kernel_aot.py", "--arch", str(arch), "--only", only],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)["kernels"]
    return rows


@pytest.mark.parametrize(
    "only",
    [
        r"^replay \w+( deferred)? float32|^commit \w+ (chain|tree) deferred|^compact|^advance|^tree_",
        r"^wy (chain|tree deferred) float32 state, bfloat16",
        r"^paths|^all ",
    ],
    ids=["replay", "wy", "paths"],
)
def test_nothing_spills_on_thor(only: str) -> None:
    assembler = ptxas.chosen(ptxas.THOR)
    assert assembler is not None
    if HAS_GPU and (said := ptxas.complaint(assembler, ptxas.THOR)):  # else a fault of what this project pins
        pytest.skip(f"not run: what this Triton takes for Thor does not know it: {said}")
    rows = compiled(110, only)
    assert len(rows) >= 4
    for row in rows:
        assert row["spill_stores"] == row["spill_loads"] == 0, row
        assert row["shared"] <= SHARED_BYTES, row


def test_replay_sums_in_the_order_of_vllm() -> None:
    """Same tile layouts under every sum, and the same runs of fused multiply-adds: the order of bits on a GPU."""
    pytest.importorskip("vllm")
    rows = {row["configuration"]: row for row in compiled(90, r"vllm|^replay tree \w+ state, BV 32, walkers 1")}
    for state in ("float32", "bfloat16"):
        theirs, ours = rows[f"vllm {state} state"], rows[f"replay like vllm {state} state"]
        tree = rows[f"replay tree {state} state, BV 32, walkers 1"]
        assert theirs["summed_over"] == ours["summed_over"] == tree["summed_over"]
        assert theirs["fused_runs"] == ours["fused_runs"]
        assert tree["fused_runs"] == [32, *ours["fused_runs"]]  # nodes that are walked again cost one update
        assert theirs["swapped_first_products"] == ours["swapped_first_products"] == tree["swapped_first_products"]
