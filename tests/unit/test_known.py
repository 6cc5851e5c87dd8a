"""What is known about logs and combinations: the data is whole, and every line of the fixture finds its remedy."""

from typing import Any

import pytest

from tests.thor_tree import fixture
from thor_spec.known import combinations, log_lines
from thor_spec.serve.failure import first_odd_line, remedy

SECTIONS = {
    "good boot": None,
    "untuned MoE": "untuned MoE",
    "ptxas": "ptxas too old",
    "GDN MTP kernel missing": "GDN decode kernel missing",
    "wrong cubin": "wrong cubin",
    "MoE tile": "MoE tile",
    "startup memory check": "memory at the start",
    "engine hung": "never scheduled",
    "spec-decode degenerate loop": "degenerate drafts",
}


def sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in fixture("vllm_logs_thor.txt").splitlines():
        if line.startswith("# --- "):
            name = line.removeprefix("# --- ").split(" [")[0].split(",")[0]
            found[name] = []
        elif line.strip():
            found[name].append(line)
    return found


def test_the_fixture_s_sections_are_all_known() -> None:
    assert set(sections()) == set(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_lines_of_logs(name: str) -> None:
    found = log_lines.find_all(sections()[name])
    wanted = SECTIONS[name]
    assert [known.name for known in found][:1] == ([wanted] if wanted else [])


def test_the_first_odd_line_wins_and_has_its_remedy() -> None:
    logs = sections()
    lines = [*logs["good boot"], *logs["untuned MoE"], *logs["wrong cubin"], *logs["ptxas"], "RuntimeError: later"]
    odd = first_odd_line(lines)
    assert odd == "This kernel only supports sm100f."
    assert "FlashInfer picked a kernel" in remedy(odd)
    assert remedy("RuntimeError: never seen") == ""
    assert remedy(None) == ""


def test_a_device_without_memory() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "Lower --kv-cache-memory" in remedy(first_odd_line([line]))


def test_a_worker_that_was_killed() -> None:
    line = (
        "(EngineCore pid=7) ERROR 11-29 20:00:39 [multiproc_executor.py:316] Worker proc VllmWorker-1 died "
        "unexpectedly (exit code: -9), shutting down executor."
    )
    odd = first_odd_line(["INFO fine", line, "RuntimeError: cancelled"])
    assert odd == "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."
    assert "dmesg" in remedy(odd)


def test_a_package_that_is_missing() -> None:
    odd = first_odd_line(["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torchvision'"])
    assert "imports torchvision" in remedy(odd)


def test_a_tuned_moe_shape_is_no_untuned_one() -> None:
    line = "Using configuration from /x/fused_moe/configs/E=256,N=512,device_name=NVIDIA_Thor.json for MoE layer."
    assert log_lines.find(f"INFO 11-29 20:00:39 [fused_moe.py:1151] {line}") is None
    assert log_lines.find("Using default MoE config. Performance might be sub-optimal! Config file not found at x.json")


def test_the_kernel_s_log() -> None:
    found = log_lines.find_all(fixture("dmesg_unified_oom.txt").splitlines())
    assert [known.name for known in found] == ["driver out of memory", "OOM killer"]


def test_every_line_has_remedy_and_source() -> None:
    names = [known.name for known in log_lines.table()]
    assert len(set(names)) == len(names)
    for known in log_lines.table():
        assert known.remedy.endswith(".")
        assert known.sources


THOR: dict[str, Any] = {"board": "thor", "hybrid": True, "drafter": True, "method": "dflash"}


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"board": "thor", "hybrid": True, "method": "mtp", "gdn_decode_kernel": "cuda"}, "gdn-mtp-decode"),
        ({"vllm": "0.29.0", "hybrid": True}, "vllm-0.29.0-gdn"),
        ({**THOR, "weights": "fp8", "flashinfer": True}, "fp8-hybrid-flashinfer"),
        ({"board": "thor", "flash_attention": 3}, "fa3"),
        ({"moe_backend": True, "weights": "nvfp4", "drafter": True}, "forced-moe-backend"),
        ({**THOR, "vllm": "0.28.1", "prefix_caching": True}, "prefix-cache-0.28"),
        ({**THOR, "vllm": "0.33.0", "prefix_caching": True}, "prefix-cache-drafts"),
        ({"hybrid": True, "method": "ngram"}, "ngram-hybrid"),
        ({"rope": "yarn", "drafter": True}, "yarn-drafter"),
        ({"method": "dflash", "context": 185_000}, "dflash-deep"),
        ({"method": "dflash", "vllm": "0.20.2", "kv_dtype": "fp8"}, "fp8-kv-dflash-0.20"),
        ({"restart": "unless-stopped"}, "restart-policy"),
        ({"flashinfer": True, "flashinfer_cubins": False, "weights": "nvfp4"}, "autotune-without-cubins"),
        ({"image": "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-thor"}, "moving-tag"),
        ({"board": "gb10", "vllm": "0.24.0"}, "start-check-unified"),
        ({"board": "thor", "image_l4t": 36}, "l4t-of-another-line"),
    ],
)
def test_combinations(facts: dict[str, Any], name: str) -> None:
    assert name in [combination.name for combination in combinations.matching(facts)]
    for missing in facts:  # with any fact unknown it is not claimed
        rest = {key: value for key, value in facts.items() if key != missing}
        wanted = next(entry for entry in combinations.table() if entry.name == name)
        if missing in dict(wanted.when):
            assert not wanted.matches(rest)


def test_a_digest_says_which_build_whatever_the_tag() -> None:
    tag, digest = "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-thor", f"sha256:{'0' * 64}"
    assert [entry.name for entry in combinations.matching(combinations.of_image(tag))] == ["moving-tag"]
    assert combinations.of_image(f"{tag}@{digest}") == {"digest": digest}
    assert combinations.matching(combinations.of_image(f"{tag}@{digest}")) == ()


def test_every_combination_is_tested_but_the_one_without_a_digest() -> None:
    import inspect

    text = inspect.getsource(test_combinations) + str(test_combinations.pytestmark)  # type: ignore[attr-defined]
    assert [entry.name for entry in combinations.table() if entry.name not in text] == ["graphs-die-after-5"]


@pytest.mark.parametrize(
    "facts",
    [
        {
            "vllm": "0.33.0",
            "hybrid": True,
            "drafter": True,
            "method": "dflash",
            "prefix_caching": False,
            "context": 32768,
        },
        {"board": "cuda", "flash_attention": 3, "vllm": "0.33.0"},
        {"vllm": "not a version", "hybrid": True},
        {},
    ],
)
def test_what_works_is_left_alone(facts: dict[str, Any]) -> None:
    assert combinations.matching(facts) == ()


def test_combinations_have_sources_and_remedies() -> None:
    for entry in combinations.table():
        assert entry.sources, entry.name
        assert entry.remedy.endswith("."), entry.name
        assert entry.confidence in ("one", "several")
        assert "(" in entry.describe()
