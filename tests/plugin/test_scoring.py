"""The engine of an evaluation starts by what a server's command line says, but for what only servers know."""

from pathlib import Path

import pytest

from thor_spec.config import resolve
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin import compat, scoring


@pytest.mark.parametrize("vllm_args", [(), ("--enable-prefix-caching",)], ids=["plain", "caching"])
def test_an_engine_knows_all_that_is_left(target: Path, vllm_args: tuple[str, ...]) -> None:
    plan = make_plan(resolve({"model": str(target), "draft": "none", "vllm_args": vllm_args}))
    parser = compat.ENGINE_ARGUMENTS.resolve().__self__.add_cli_args(compat.ARGUMENT_PARSER.resolve()())
    left = scoring.engine_flags(plan.argv)
    parser.parse_args(left)  # exits, if it does not know one
    assert "--additional-config" in left
    assert ("--enable-prefix-caching" in left) == bool(vllm_args)
