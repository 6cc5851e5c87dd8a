from pathlib import Path

import pytest

from thor_spec.config import ServeConfig, resolve
from thor_spec.errors import ConfigError


def test_flag_beats_profile_beats_default(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("port: 9000\nmax-seqs: 2\n")
    resolved = resolve({"port": 9001, "host": None}, profile)
    assert (resolved.config.port, resolved.config.max_seqs, resolved.config.host) == (9001, 2, "127.0.0.1")
    assert {name: resolved.origins[name] for name in ("port", "max_seqs", "host")} == {
        "port": "flag",
        "max_seqs": "profile",
        "host": "default",
    }
    assert resolved.as_dict()["max_seqs"] == {"value": 2, "origin": "profile"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "unknown option 'prot'"),
        ("port: high", "port must be int, not str"),
        ("port: true", "port must be int, not bool"),
        ("kv_cache_memory: 4GX", "kv_cache_memory: '4GX' is not a size"),
        ("- 1", "must hold a mapping"),
        ("port: [", "is not YAML"),
    ],
)
def test_bad_profile_names_file_and_field(tmp_path: Path, text: str, says: str) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        resolve({}, profile)
    assert str(profile) in str(error.value)


@pytest.mark.parametrize("written", ["off", "15", "auto", "3x3x3", "'15'"])
def test_what_yaml_takes_for_a_number_or_a_truth_is_the_text_that_was_written(tmp_path: Path, written: str) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text(f"tree: {written}\n")
    assert resolve({}, profile).config.tree == written.strip("'")


@pytest.mark.parametrize("name", ["record", "log_file", "golden", "api_key_file", "rope_factors"])
def test_a_truth_names_no_file(tmp_path: Path, name: str) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text(f"{name}: yes\n")
    with pytest.raises(ConfigError, match=rf"p.yaml: {name} must name a file, not yes\."):
        resolve({}, profile)


def test_missing_profile() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, Path("/nowhere/p.yaml"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"draft_tokens": 0}, "at least 1"),
        ({"draft_tokens": -3}, "at least 1"),
        ({"draft": "none", "draft_tokens": 3}, "no meaning"),
        ({"draft": "none", "adaptive_drafts": True}, "no meaning"),
        ({"acceptance_floor": 2.0, "adaptive_drafts": True}, "Leave one out"),
        ({"port": 0}, "not a port"),
        ({"port": 70000}, "not a port"),
        ({"context": 0}, "--context 0 must be positive"),
        ({"kv_cache_memory": -1}, "--kv-cache-memory -1 must be positive"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServeConfig(**fields)  # type: ignore[arg-type]


def test_profile_sets_paths_and_arguments(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("log_file: /tmp/x.log\nvllm_args: [--seed, 7]\nkv_cache_memory: 4GiB\n")
    config = resolve({}, profile).config
    assert config.kv_cache_memory == 4 << 30
    assert (config.log_file, config.vllm_args) == (Path("/tmp/x.log"), ("--seed", "7"))


def test_no_drafter_takes_what_a_profile_says_of_drafts_with_it() -> None:
    """`verify lossless` starts its reference so, with whatever profile the candidate has."""
    profile = {"draft": "mine", "draft_tokens": 7, "gdn_kernel": "wy", "tree": "8", "accept": "typical", "port": 9000}
    resolved = resolve({"draft": "none"}, profile)
    assert resolved.config == ServeConfig(draft="none", port=9000)
    assert resolved.origins["gdn_kernel"] == "default"
    kept = resolve({"draft": "none", "gdn_kernel": "wy"}, profile).config  # said beside it: refused later
    assert (kept.gdn_kernel, kept.tree) == ("wy", None)
