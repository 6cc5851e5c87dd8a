"""The tiny checkpoints: text survives the tokenizer, weights repeat, every part of the models matters."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thor_spec.errors import ConfigError
from thor_spec.nano import checkpoints, corpus, drafter, fit, recipes, target, tokenizer

PROMPTS = [
    corpus.TEXT[:60],
    corpus.TEXT[700:745],
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me about rivers.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    with fit.reproducible(0), torch.no_grad():
        yield


@pytest.fixture
def short_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few training steps instead of many: for what does not depend on the quality of the models."""
    for name, recipe in recipes.TARGETS.items():
        monkeypatch.setitem(recipes.TARGETS, name, dataclasses.replace(recipe, steps=2, window=40))
    for name, known in recipes.DRAFTERS.items():
        plan = dataclasses.replace(known.plan, generated=3, quoted=4, steps=3)
        monkeypatch.setitem(recipes.DRAFTERS, name, dataclasses.replace(known, plan=plan))


@pytest.fixture(scope="session")
def load_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory, max_length=8192)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session", params=list(recipes.TARGETS))
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Return the directories of a target and of its drafter, from the user's cache."""
    return checkpoints.ensure(request.param), checkpoints.ensure(checkpoints.PAIRS[request.param])


@pytest.fixture(scope="session")
def hybrid() -> Any:
    return target.load(checkpoints.ensure("tiny-hybrid"))


def greedy(model: Any, prompt: str, new: int = 32, disturb: Callable[[Any], None] | None = None) -> list[int]:
    """Return ``new`` greedy tokens; ``disturb`` is given the cache after the prompt and four tokens."""
    out = model(torch.tensor([tokenizer.build().encode(prompt).ids]), use_cache=True)
    tokens: list[int] = []
    for step in range(new):
        tokens.append(int(out.logits[0, -1].argmax()))
        if disturb is not None and step == 4:
            disturb(out.past_key_values)
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens


def hashes(directory: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((directory / checkpoints.MANIFEST).read_text())["files"]
    return files


# Tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_text_survives_the_tokenizer(load_tokenizer: Any, text: str) -> None:
    ids = load_tokenizer.encode(text)
    assert load_tokenizer.decode(ids) == text
    assert ids == list(text.encode()) or any(mark in text for mark in tokenizer.MARKS)


@pytest.mark.parametrize("mark", tokenizer.MARKS)
def test_a_mark_is_one_token(load_tokenizer: Any, mark: str) -> None:
    ids = load_tokenizer.encode(f"a{mark}b")
    assert ids == [ord("a"), tokenizer.MARK_IDS[mark], ord("b")]
    # A tool parser reads the marks of a call from text in which special tokens were skipped.
    assert load_tokenizer.decode(ids, skip_special_tokens=True) == ("ab" if mark in tokenizer.SPECIAL else f"a{mark}b")


def test_the_template_renders_tools_and_their_calls(load_tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": [1, 2]}}}] * 2
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "three"},
    ]
    text = load_tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    system, user, assistant, results, end = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.loads(re.findall(r"<tools>\n(.*?)\n</tools>", system, re.DOTALL)[0]) == tools[0]
    assert user == "user\n1 + 2?<|im_end|>\n"
    parsed = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", assistant, re.DOTALL)]
    assert parsed == [{"name": "add", "arguments": {"a": [1, 2]}}] * 2
    assert re.findall(r"<tool_response>\n(.*?)\n</tool_response>", results) == ["3", "three"]
    assert end == "assistant\n"


# Making


def test_importing_the_room_does_not_import_torch() -> None:
    code = "import sys, thor_spec.nano.checkpoints; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny-hybrid"):
        checkpoints.ensure("tiny", tmp_path)


@pytest.mark.usefixtures("short_recipes")
@pytest.mark.parametrize("name", recipes.DRAFTERS)
def test_a_seed_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    torch.randn(3)  # whatever was drawn before must not matter
    first = checkpoints.ensure(name, tmp_path / "a")
    torch.randn(5)
    second = checkpoints.ensure(name, tmp_path / "b")
    known = recipes.DRAFTERS[name].target
    assert hashes(first) == hashes(second)
    assert hashes(first.parent / known) == hashes(second.parent / known)


RACE = """
import dataclasses, sys, time
from pathlib import Path
from thor_spec.nano import checkpoints, recipes
recipe = dataclasses.replace(recipes.TARGETS["tiny-dense"], steps=1, window=40)
recipes.TARGETS["tiny-dense"] = recipe
print(checkpoints.ensure("tiny-dense", Path(sys.argv[1])))
"""


def test_two_processes_make_one_checkpoint(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {racer.communicate()[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    assert len(said) == 1
    directory = Path(said.pop())
    assert [path.name for path in directory.parent.iterdir() if not path.name.endswith(".lock")] == ["tiny-dense"]
    assert set(hashes(directory)) == {path.name for path in directory.iterdir()} - {checkpoints.MANIFEST}


@pytest.mark.usefixtures("short_recipes")
def test_what_a_dead_maker_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / checkpoints.recipe_hash() / ".tiny-dense.0.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    directory = checkpoints.ensure("tiny-dense", tmp_path)
    assert not leftover.exists()
    assert (directory / checkpoints.MANIFEST).exists()


# Targets


def test_the_configuration_has_what_kernels_need(hybrid: Any) -> None:
    config = hybrid.config
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim) == (128, 128, 4)
    assert config.head_dim * config.rope_parameters["partial_rotary_factor"] % 2 == 0
    assert config.vocab_size == tokenizer.VOCABULARY >= 256 + len(tokenizer.MARKS)
    assert tokenizer.VOCABULARY % 64 == 0
    assert config.eos_token_id == tokenizer.MARK_IDS[tokenizer.IM_END]


def test_greedy_text_is_various_and_runs_to_its_length(pair: tuple[Path, Path]) -> None:
    model = target.load(pair[0])
    texts = [bytes(greedy(model, prompt)).decode() for prompt in PROMPTS]  # bytes() fails on any special token
    assert len(set(texts)) > len(texts) / 2  # unknown questions may fall into the same sentence
    assert all(len(set(text)) > 5 for text in texts)


def test_weights_are_bf16_under_their_published_names(pair: tuple[Path, Path]) -> None:
    from safetensors.torch import load_file

    known = recipes.TARGETS[pair[0].name]
    stored = load_file(pair[0] / "model.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: tensor.shape for name, tensor in target.weights(known).items()
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def zero_states(cache: Any) -> None:
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].zero_()


def zero_windows(cache: Any) -> None:
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            layer.conv_states[0].zero_()


def zero_keys_and_values(cache: Any) -> None:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys.zero_()
            layer.values.zero_()


@pytest.mark.parametrize("disturb", [zero_states, zero_windows, zero_keys_and_values])
def test_what_the_cache_holds_decides_tokens(hybrid: Any, disturb: Callable[[Any], None]) -> None:
    assert any(greedy(hybrid, prompt) != greedy(hybrid, prompt, disturb=disturb) for prompt in PROMPTS)


@pytest.mark.parametrize("layer", range(3))
def test_every_gdn_layer_decides_tokens(hybrid: Any, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [greedy(hybrid, prompt) for prompt in PROMPTS]
    projection = hybrid.model.layers[layer].linear_attn.out_proj
    monkeypatch.setattr(projection.weight, "data", torch.zeros_like(projection.weight))
    assert before != [greedy(hybrid, prompt) for prompt in PROMPTS]


# Drafters

SHAPE = drafter.DrafterShape(
    vocabulary=320, hidden=32, target_layers=4, target_layer_ids=(1, 3), mask_token_id=261, block_size=4, layers=2,
    heads=4, kv_heads=2, head_dim=8, intermediate=48,
)  # fmt: skip
ANCHORS = torch.tensor([[3, 6]])


def run_small(embedded: Tensor, features: Tensor) -> Tensor:
    """Return [1, 2, 4, 32]: two blocks of four, anchored at 3 and 6, over a context of 8."""
    torch.manual_seed(1)
    module = drafter.Drafter(SHAPE)
    positions = (ANCHORS[..., None] + torch.arange(4)).flatten(1)
    seen = torch.arange(features.shape[1])[None]
    mask = drafter.block_mask(ANCHORS, 4, features.shape[1])
    out: Tensor = module(embedded, positions, features, seen, mask)
    return out.unflatten(1, (2, 4))


def small_inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(1, 8, 32), torch.randn(1, 8, 64)


@pytest.mark.parametrize(
    ("position", "sees"),
    [(2, (True, True)), (3, (False, True)), (5, (False, True)), (6, (False, False)), (7, (False, False))],
)
def test_a_block_sees_features_strictly_before_its_anchor(position: int, sees: tuple[bool, bool]) -> None:
    embedded, features = small_inputs()
    before = run_small(embedded, features)
    features[:, position] += 1
    after = run_small(embedded, features)
    assert tuple((before[0, block] != after[0, block]).any().item() for block in range(2)) == sees


def test_a_block_sees_itself_in_both_directions_and_no_other() -> None:
    embedded, features = small_inputs()
    before = run_small(embedded, features)
    embedded[:, 7] += 1  # the last slot of the second block
    after = run_small(embedded, features)
    assert torch.equal(before[0, 0], after[0, 0])
    assert (before[0, 1] != after[0, 1]).any(dim=-1).all()


def test_padding_after_the_context_changes_nothing() -> None:
    embedded, features = small_inputs()
    padded = torch.cat([features, torch.full((1, 5, 64), 9.0)], dim=1)
    assert torch.allclose(run_small(embedded, features), run_small(embedded, padded), atol=1e-5)


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    x, positions = torch.randn(1, 5, 2, 8), torch.tensor([[0, 1, 7, 100, 5000]])
    angle = positions[..., None] * 1e4 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.cat([angle, angle], dim=-1)
    want, _ = apply_rotary_pos_emb(x, x, angle.cos(), angle.sin(), unsqueeze_dim=2)
    assert torch.allclose(drafter.rotate(x, positions, 1e4), want, atol=1e-4)


def test_a_drafter_comes_back_from_its_directory(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = drafter.Drafter(SHAPE).to(torch.bfloat16).float()
    module.save(tmp_path)
    back = drafter.load(tmp_path)
    assert back.shape == SHAPE
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_the_drafter_configuration_is_what_an_engine_reads(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[1] / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 16
    assert config["num_target_layers"] == recipes.TARGETS[pair[0].name].layers
    assert max(config["dflash_config"]["target_layer_ids"]) < config["num_target_layers"]
    assert config["dflash_config"]["mask_token_id"] == tokenizer.MARK_IDS[tokenizer.MASK]
    assert json.loads((pair[1] / checkpoints.MANIFEST).read_text())["target"]["files"] == hashes(pair[0])


@pytest.mark.parametrize("block", [8, 16])
def test_drafts_are_accepted_in_part(pair: tuple[Path, Path], block: int) -> None:
    model, module = target.load(pair[0]), drafter.load(pair[1])
    torch.manual_seed(4)
    ids = fit.continuations(model, fit.prompts(9, 40), 48)
    features = fit.tap(model, ids, module.shape.target_layer_ids)
    anchors = torch.arange(40, ids.shape[1] - block).expand(len(ids), -1)
    wanted = ids.unfold(1, block, 1)[:, 40 : 40 + anchors.shape[1], 1:]

    def accepted(candidate: drafter.Drafter) -> float:
        drafts = fit.draft_logits(model, candidate, ids, features, anchors, block).argmax(dim=-1)
        return float((drafts == wanted).int().cumprod(dim=-1).sum(dim=-1).float().mean())

    untrained, trained = accepted(drafter.Drafter(module.shape)), accepted(module)
    assert untrained < 0.4 < 0.8 < trained < 0.8 * (block - 1), (untrained, trained)
