import pytest

from thor_spec.errors import ConfigError
from thor_spec.serve import passthrough

OURS = {"--port": "8000", "--speculative-config": '{"method": "dflash"}'}
OPTIONS = {"--port": "--port", "--speculative-config": "--draft"}


@pytest.mark.parametrize("args", [[], ["--seed", "1"], ["--port", "8000"], ["--port=8000"], ["--enforce-eager"]])
def test_agreement_passes(args: list[str]) -> None:
    passthrough.require_no_contradiction(OURS, args, OPTIONS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port", "9"], "--port 9 after -- contradicts --port 8000"),
        (["--port=9"], "Use --port instead"),
        (["--speculative_config", "{}"], "Use --draft instead"),
        (["--speculative-config.num_speculative_tokens", "3"], "contradicts"),
        (["--compilation-config", "{mode: 0}"], "needs JSON"),
        (["--hf-overrides="], "needs JSON"),
        (["--port"], "contradicts"),
    ],
)
def test_contradiction_and_malformed_json(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        passthrough.require_no_contradiction(OURS, args, OPTIONS)


def test_mentions_sees_negations_and_fields() -> None:
    assert passthrough.mentions(["--no-enable-prefix-caching"], "--enable-prefix-caching")
    assert passthrough.mentions(["--a.b", "1"], "--a")
    assert not passthrough.mentions(["--enable"], "--enable-prefix-caching")


@pytest.mark.parametrize("form", [["--additional-config", '{"x": 1}'], ['--additional_config={"x": 1}']])
def test_additional_config_is_merged(form: list[str]) -> None:
    merged, rest = passthrough.merged_additional_config({"thor_spec": {}}, ["--seed", "1", *form, "--eager"])
    assert merged == {"thor_spec": {}, "x": 1}
    assert rest == ["--seed", "1", "--eager"]


@pytest.mark.parametrize(
    ("value", "says"), [('{"thor_spec": {}}', "sets thor_spec"), ("[1]", "JSON object"), ("{", "needs JSON")]
)
def test_additional_config_is_checked(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        passthrough.merged_additional_config({"thor_spec": {}}, ["--additional-config", value])
