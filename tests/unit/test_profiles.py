"""Profiles: the bundled ones are whole, and a mistake is named by file, line and field."""

import json
from pathlib import Path

import pytest

from thor_spec.capacity.plan import Request, make
from thor_spec.capacity.shape import ModelShape
from thor_spec.capacity.weights import components, weight_bytes
from thor_spec.cli.main import main
from thor_spec.config import ServeConfig, resolve
from thor_spec.errors import ConfigError
from thor_spec.profiles import catalogue

NAMES = ("llada2.1-mini", "nano", "qwen3.5-122b-a10b", "qwen3.5-4b", "qwen3.6-27b", "qwen3.6-35b-a3b", "tiny")
GOOD = """\
schema: 1
name: mine
title: my own
serve:
  model: {value: ./model, confidence: design, source: me}
  draft: {value: none, confidence: design, source: me}
  max_seqs: {value: 2, confidence: measured, source: me}
environment:
  MY_SWITCH: {value: "1", confidence: one, source: somebody}
engine:
  attention_backend: {value: TRITON_ATTN, confidence: one, source: somebody}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "thor-spec" / "profiles"
    folder.mkdir(parents=True)
    return folder


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    code = ended.value.code
    return (code if isinstance(code, int) else 0, *capsys.readouterr())


def test_the_bundled_ones() -> None:
    assert tuple(catalogue.paths()) == ("agent", *NAMES)


def test_a_layer_lies_over_a_models_profile() -> None:
    model = catalogue.get("qwen3.6-35b-a3b").options()
    merged = catalogue.layered(["qwen3.6-35b-a3b", "agent"])
    assert isinstance(merged, dict)
    assert (merged["model"], model["max_seqs"], merged["max_seqs"]) == (model["model"], 1, 4)
    assert merged["vllm_args"] == (*model["vllm_args"], "--max-num-batched-tokens", "4096")
    assert merged["environment"] == model["environment"]
    assert catalogue.layered(["agent"]) == catalogue.get("agent").options()
    assert catalogue.layered([]) is None


def test_a_plain_file_may_lie_over_a_profile(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("max-seqs: 2\nenvironment: {A: b}\n")
    merged = catalogue.layered(["nano", str(tmp_path / "mine.yaml")])
    assert isinstance(merged, dict)
    assert (merged["model"], merged["max_seqs"], merged["environment"]) == ("nano-hybrid", 2, {"A": "b"})


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_profile_is_whole(name: str) -> None:
    profile = catalogue.get(name)
    config = ServeConfig(**profile.options())
    assert config.draft
    assert all(value.source and value.confidence for value in profile.values())
    shapes = [profile.shape(which) for which in ("target", "drafter")]
    assert shapes[0] is not None
    target = ModelShape.parse(name, shapes[0])
    drafter = ModelShape.parse("drafter", shapes[1]) if shapes[1] else None
    request = Request(
        memory=122 << 30,
        context=config.context or target.context,
        max_seqs=config.max_seqs,
        draft_tokens=config.draft_tokens or 0,
    )
    assert make(request, target, drafter).fits


@pytest.mark.parametrize(
    ("name", "billions", "gigabytes"),
    [
        ("qwen3.5-122b-a10b", 122, 71),
        ("qwen3.6-27b", 27, None),
        ("qwen3.5-4b", 4.2, None),
        ("llada2.1-mini", 16.3, 32.5),  # its published size
        ("qwen3.6-35b-a3b", 34.7, None),
    ],
)
def test_their_dims_make_the_model_s_name(name: str, billions: float, gigabytes: float | None) -> None:
    config = catalogue.get(name).shape("target")
    assert config is not None
    shape = ModelShape.parse(name, config)
    assert sum(component.total for component in components(shape)) / 1e9 == pytest.approx(billions, rel=0.01)
    if gigabytes:
        assert weight_bytes(shape) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title: my own\n", "", "mine.yaml:1: the file lacks title."),
        ("value: 2,", "value: two,", "mine.yaml:7: serve.max_seqs.value must be integer, not 'two'."),
        ("value: 2,", "value: 0,", "mine.yaml:7: serve.max_seqs.value 0 is less than the minimum of 1."),
        ("max_seqs:", "max_sex:", "mine.yaml:4: serve has unknown fields: max_sex."),
        ("confidence: measured", "confidence: high", "mine.yaml:7: serve.max_seqs.confidence must be one of several,"),
        (", source: somebody}\nengine", "}\nengine", "mine.yaml:9: environment.MY_SWITCH lacks source."),
        ("MY_SWITCH", "my-switch", "mine.yaml:8: environment"),
        ("max_seqs: {value: 2", "memory_floor: {value: 2 GX", "mine.yaml:7: serve.memory_floor.value"),
        ("schema: 1", "schema: 2", "mine.yaml:1: schema 1 was expected."),
        ("name: mine", "name: other", "mine.yaml:2: name must be 'mine'"),
        ("title: my own", "title: my own\ntitle: again", "mine.yaml:4: title stands here twice."),
        ("title: my own", "title: [", "mine.yaml:5: not YAML"),
        ("title: my own", "image: {value: vllm:latest, confidence: one, source: me}\ntitle: t", "mine.yaml:3: image"),
    ],
)
def test_a_mistake_names_file_line_and_field(
    home: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    assert old in GOOD
    (home / "mine.yaml").write_text(GOOD.replace(old, new))
    code, out, _ = call(capsys, "profiles", "check", "mine")
    assert code == 2
    assert says in out


def test_a_mistake_in_a_list_has_its_line(home: Path) -> None:
    good, bad = ("    - {value: [" + inner + "], confidence: one, source: me}\n" for inner in ("x", ""))
    (home / "mine.yaml").write_text(f"{GOOD}  arguments:\n{good}{bad}    - nothing\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:15: engine.arguments.2 must be object") as error:
        catalogue.get("mine")
    assert "mine.yaml:14: engine.arguments.1.value" in str(error.value)


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "[" * 100_000, "\0"])
def test_yaml_without_an_end_is_a_mistake_like_others(
    home: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (home / "mine.yaml").write_text(text)
    code, out, _ = call(capsys, "profiles", "check", "mine")
    assert (code, len(out.splitlines())) == (2, 1)
    assert "mine.yaml: " in out
    code, _, err = call(capsys, "serve", "--dry-run", "--profile", "mine")
    assert (code, len(err.splitlines())) == (2, 1)


def test_all_mistakes_are_told_at_once(home: Path) -> None:
    (home / "mine.yaml").write_text(GOOD.replace("value: 2,", "value: two,").replace("title: my own\n", ""))
    with pytest.raises(ConfigError) as error:
        catalogue.get("mine")
    assert str(error.value).count("mine.yaml:") == 2


def test_options_that_contradict_themselves_have_a_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = "  draft_tokens: {value: 3, confidence: one, source: me}\n"
    (home / "mine.yaml").write_text(GOOD.replace("environment:", f"{tokens}environment:"))
    code, out, _ = call(capsys, "profiles", "check", "mine")
    assert code == 2
    assert "mine.yaml:4: serve --draft-tokens has no meaning with --draft none" in out


def test_yours_win_and_are_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "nano.yaml").write_text(GOOD.replace("name: mine", "name: nano"))
    assert call(capsys, "profiles", "check", "nano", "qwen3.6-27b")[:2] == (0, "nano: good\nqwen3.6-27b: good\n")
    listed = {entry["name"]: entry for entry in json.loads(call(capsys, "profiles", "list", "--json")[1])}
    assert listed["nano"]["title"] == "my own"
    assert str(home / "nano.yaml") in call(capsys, "profiles", "list")[1]


def test_show_has_confidence_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "profiles", "show", "qwen3.6-35b-a3b")[1]
    assert "serve.draft_tokens  " in out
    assert "several: agentculture/lobes-cli" in out
    assert "image" in out
    assert "(empty)" in out
    values = json.loads(call(capsys, "profiles", "show", "nano", "--json")[1])["values"]
    assert [(value["field"], value["value"]) for value in values if value["field"] == "serve.draft_tokens"] == [
        ("serve.draft_tokens", 7)
    ]


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "profiles", "show", "qwen9")
    assert code == 2
    assert "Known: agent, llada2.1-mini, nano" in err
    assert "no profile qwen9" in call(capsys, "serve", "--profile", "qwen9")[2]


def test_serve_takes_a_profile(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = "memory_floor: {value: 6GiB, confidence: design, source: me}"
    (home / "mine.yaml").write_text(GOOD.replace("./model", "tiny-hybrid").replace("max_seqs", f"{size}\n  max_seqs"))
    argv = ("serve", "--profile", "mine", "--dry-run", "--json", "--", "--seed", "7")
    plan = json.loads(call(capsys, *argv)[1])
    assert plan["environment"]["MY_SWITCH"] == "1"
    assert plan["config"]["max_seqs"] == {"value": 2, "origin": "profile"}
    assert plan["config"]["memory_floor"]["value"] == 6 << 30
    given = plan["argv"]
    assert given[given.index("--attention-backend") + 1] == "TRITON_ATTN"
    assert given[-2:] == ["--seed", "7"]


def test_a_profile_may_not_take_our_variables(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("./model", "tiny-hybrid").replace("MY_SWITCH", "VLLM_USE_V2_MODEL_RUNNER")
    (home / "mine.yaml").write_text(text)
    code, _, err = call(capsys, "serve", "--profile", "mine", "--dry-run")
    assert code == 2
    assert "sets VLLM_USE_V2_MODEL_RUNNER, which thor-spec sets itself" in err


def test_arguments_of_profile_and_flags_are_both_passed() -> None:
    found = resolve({"vllm_args": ("--seed", "7")}, {"vllm_args": ("--enforce-eager",)}).config
    assert found.vllm_args == ("--enforce-eager", "--seed", "7")
