"""A process is given the ``cpu`` backend by its path alone, and so is every process that it starts."""

import os
import subprocess
import sys

import pytest

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import interpreter
from thor_spec.vllm_plugin.options import PluginOptions

BACKENDS = "import triton.backends as b; print(sorted(b.backends))"
SPAWNED = f"""
import multiprocessing
def child(): exec({BACKENDS!r})
if __name__ == "__main__":
    p = multiprocessing.get_context("spawn").Process(target=child); p.start(); p.join()
"""
KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
x = torch.arange(5.0); double[(1,)](x, 5, B=8); print(x.tolist())
"""


def run(tmp_path: object, code: str, *, interpreted: bool) -> str:
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(code)
    plain = {k: v for k, v in os.environ.items() if k not in interpreter.environment()}
    env = {**plain, **(interpreter.environment() if interpreted else {})}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("code", [BACKENDS, SPAWNED], ids=["process", "spawned child"])
def test_backend_is_there_on_the_path_and_only_there(tmp_path: object, code: str) -> None:
    assert "'cpu'" in run(tmp_path, code, interpreted=True)
    assert "'cpu'" not in run(tmp_path, code, interpreted=False)


def test_a_kernel_runs(tmp_path: object) -> None:
    assert run(tmp_path, KERNEL, interpreted=True) == "[0.0, 2.0, 4.0, 6.0, 8.0]"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"thor_spec": {"runner_kernels": "numpy"}}, "is not one of"),
        ({"thor_spec": {"kernels": "torch"}}, "unknown options kernels"),
        ({"thor_spec": []}, "must be an object"),
    ],
)
def test_bad_options_name_the_field(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PluginOptions.parse(given)


def test_options_default_to_vllms_own() -> None:
    assert PluginOptions.parse({}).runner_kernels == "triton"
