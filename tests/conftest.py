"""Kernels are interpreted where there is no GPU; this must be settled before anything imports Triton."""

import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.checkpoints import drafter, make_checkpoint, target  # noqa: F401  # fixtures for every folder
from thor_spec.device import cuda
from thor_spec.vllm_plugin import interpreter

# How fast an example is says something about the machine alone.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell starts what runs in its background with Ctrl-C ignored, and so would everything that tests start be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = cuda.probe() is not None

if not HAS_GPU:
    os.environ.update(interpreter.environment(os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(interpreter.PATH))
# Two threads of OpenMP on two cores that also run the tests take turns spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


@pytest.fixture(autouse=True, scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Records of stopped jobs stay out of the home directory."""
    os.environ["THOR_SPEC_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all cases, where a part of them is enough for every commit")
    parser.addoption("--llada2-prompts", type=int, default=8, help="prompts that LLaDA2 must answer as defined")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether to spare no time."""
    return bool(request.config.getoption("--full"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="not run: needs a CUDA device"))
