"""Several devices, and several nodes of them."""

from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import ConfigError

from .conftest import Make, value


def test_several_devices_are_passed_through(make: Make) -> None:
    plan = make(tensor_parallel=2, pipeline_parallel=2, executor="ray")
    assert value(plan, "--tensor-parallel-size") == "2"
    assert value(plan, "--pipeline-parallel-size") == "2"
    assert value(plan, "--distributed-executor-backend") == "ray"
    assert "--nnodes" not in plan.argv
    with pytest.raises(ConfigError, match="Use --tensor-parallel instead"):
        make(tensor_parallel=2, vllm_args=("--tensor-parallel-size", "4"))


def test_the_other_nodes_are_headless(make: Make, target: Path) -> None:
    nodes = {"tensor_parallel": 2, "nnodes": 2, "master_addr": "10.0.0.1"}
    first, second = make(**nodes), make(**nodes, node_rank=1)
    assert first.argv[2] == "thor_spec.vllm_plugin.server"
    assert second.argv[2:6] == ("vllm.entrypoints.cli.main", "serve", str(target), "--headless")
    assert "--model" not in second.argv
    for plan in (first, second):
        assert (value(plan, "--nnodes"), value(plan, "--master-addr")) == ("2", "10.0.0.1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"executor": "threads"}, "not one of mp, ray"),
        ({"nnodes": 2}, "needs --master-addr"),
        ({"nnodes": 2, "master_addr": "a"}, "1 workers .* over 2 nodes"),
        ({"nnodes": 2, "master_addr": "a", "tensor_parallel": 2, "node_rank": 2}, r"must lie in 0\.\.1"),
        ({"nnodes": 2, "master_addr": "a", "executor": "ray"}, "the cluster knows its nodes"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0 must be positive"),
    ],
)
def test_devices_that_cannot_work(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**flags)
