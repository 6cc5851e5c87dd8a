"""LLaDA2 in the engine against its definition in plain torch: the same tokens, whatever shares the batch."""

import inspect
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from thor_spec.diffusion import decoding, layout
from thor_spec.diffusion.dense import Dense
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError
from thor_spec.nano import shipped
from thor_spec.vllm_plugin.llada2 import registration, state
from thor_spec.vllm_plugin.llada2.state import in_blocks

NANO = shipped.find(shipped.DIFFUSION)
MODES = ({"mode": "quality"}, {"mode": "speed"}, {"mode": "2.0"})
UNEDITED = 2
FIRST_SCORED = 2 * len(MODES) + 2
FAULTS = ("causal", "prompt in one block", "last change not stored")
TOKENS = 40
CONTEXT = 256
BLOCK_BYTES = 5 * 2 * 2 * 64 * 32 * 4
"""Of nano-llada's keys and values of 32 tokens, in float32."""
LENGTHS = (1, 31, 32, 33, 64, 150, 200, 90)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Texts of lengths that end in, on and beyond a block."""
    from tokenizers import Tokenizer

    assert NANO
    ids = Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(inspect.getsource(textwrap)).ids
    dice = random.Random(5)
    lengths = (*LENGTHS, *(dice.randint(1, 200) for _ in range(count)))[:count]
    starts = [dice.randrange(len(ids) - n) for n in lengths]
    return [[i % vocabulary for i in ids[start : start + n]] for start, n in zip(starts, lengths, strict=True)]


def generate(
    folder: Path, model: Path, runs: Sequence[dict[str, Any]], *, overlap: bool, **engine: Any
) -> dict[str, Any]:
    out = folder / "out.json"
    job = {
        "runs": runs,
        "overlap": overlap,
        "engine": {
            "model": str(model), "dtype": "float32", "max_model_len": CONTEXT, "max_num_seqs": 8, "block_size": 32,
            "max_num_batched_tokens": 160, "enforce_eager": True, "disable_log_stats": False,
            "kv_cache_memory_bytes": 8 << 20,
            "additional_config": {"thor_spec": {"runner_kernels": "torch"}}, **engine,
        },
    }  # fmt: skip
    script = Path(__file__).with_name("llada2_engine.py")
    ours = {"VLLM_PLUGINS": "thor_spec", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(out)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=max(280, 2 * sum(len(run["prompts"]) for run in runs)),
        env={**os.environ, **ours},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Steps overlap with scheduling, as on a GPU; where many prompts are asked for, once without as well."""
    if "nano" in metafunc.fixturenames:
        ways = ("overlapping", "in turn") if metafunc.config.getoption("--llada2-prompts") > 8 else ("overlapping",)
        metafunc.parametrize("nano", ways, indirect=True, scope="module")


@pytest.fixture(scope="module")
def nano(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine said, with too little memory for all requests at once, and what it should have said."""
    if NANO is None:
        pytest.skip("nano-llada is not shipped here")
    model = Dense.load(NANO)
    asked = prompts(request.config.getoption("--llada2-prompts"), model.config["vocab_size"])
    sampling = {"max_tokens": TOKENS}
    runs = [
        {"prompts": asked, "together": together, "denoise": mode, "sampling": sampling}
        for mode in MODES
        for together in (False, True)
    ]
    hot = {**sampling, "temperature": 0.8, "top_p": 0.9, "seed": 11}
    drawn = [{**hot}, {**hot, "seed": 12}]
    runs += [{"prompts": asked[:4], "together": True, "sampling": hotter} for hotter in drawn]
    scored = {"together": True, "sampling": {**sampling, "logprobs": 0}, "denoise": MODES[UNEDITED]}
    runs += [{**scored, "prompts": asked[:8], "fault": fault} for fault in (None, *FAULTS)]
    runs.append({"prompts": [asked[6] + asked[6][:50]], "together": True, "sampling": {"max_tokens": 6}})
    overlap = request.param == "overlapping"
    found = generate(
        tmp_path_factory.mktemp("nano"), NANO, runs, overlap=overlap, kv_cache_memory_bytes=18 * BLOCK_BYTES
    )
    wanted = [[reference(model, prompt, mode) for prompt in asked] for mode in MODES]
    return {"model": model, "asked": asked, "found": found, "wanted": wanted, "runs": runs}


def reference(model: Dense, prompt: list[int], given: dict[str, Any], most: int = TOKENS) -> decoding.Decoded:
    settings = Denoising().of_request(given)
    return decoding.decode(model.decoder(), prompt, most=most, block=32, mask=model.mask, settings=settings)


@pytest.mark.parametrize("mode", range(len(MODES)), ids=[str(mode) for mode in MODES])
@pytest.mark.parametrize("together", [0, 1], ids=["batch 1", "batch 8"])
def test_the_engine_says_what_the_definition_says(nano: dict[str, Any], mode: int, together: int) -> None:
    got = nano["found"]["runs"][2 * mode + together]
    assert got["tokens"] == [decoded.tokens for decoded in nano["wanted"][mode]]
    assert got["again"] == got["tokens"][-1]


def test_tokens_were_edited_and_counted(nano: dict[str, Any]) -> None:
    assert sum(decoded.edits for wanted in nano["wanted"] for decoded in wanted) > 0
    forwards, blocks, tokens, fills, edits = nano["found"]["counts"]
    assert forwards > blocks > 0
    assert edits > 0
    assert tokens >= 2 * sum(len(d.tokens) for wanted in nano["wanted"] for d in wanted)
    assert fills >= tokens  # what was preempted on its way was filled in vain


def test_memory_was_short_and_prefixes_were_cached(nano: dict[str, Any]) -> None:
    assert nano["found"]["metrics"]["vllm:num_preemptions"] > 0
    assert min(run["cached"] for run in nano["found"]["runs"][: 2 * len(MODES)]) > 0


def test_drawn_tokens_follow_their_seed(nano: dict[str, Any]) -> None:
    one, other = nano["found"]["runs"][2 * len(MODES) : 2 * len(MODES) + 2]
    assert one["again"] == one["tokens"][-1]
    assert one["tokens"] != other["tokens"]
    assert one["tokens"] != [decoded.tokens for decoded in nano["wanted"][0][:4]]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_what_is_said(nano: dict[str, Any], fault: str) -> None:
    """In words, or in how sure they are: small faults leave the words alone where the model has no choice."""
    good, *broken = nano["found"]["runs"][FIRST_SCORED : FIRST_SCORED + 1 + len(FAULTS)]
    got = broken[FAULTS.index(fault)]
    assert got["tokens"] != good["tokens"] or np.abs(np.subtract(got["logprobs"], good["logprobs"])).max() > 0.05


def test_log_probabilities_are_those_of_the_settled_block(nano: dict[str, Any]) -> None:
    model: Dense = nano["model"]
    for prompt, given in zip(nano["asked"][1:4], nano["found"]["runs"][FIRST_SCORED]["logprobs"][1:4], strict=True):
        text = [*prompt, *reference(model, prompt, MODES[UNEDITED], most=TOKENS + 32).tokens]
        decoder, wanted = model.decoder(), []
        for start in range(0, -(-(len(prompt) + TOKENS) // 32) * 32, 32):
            logits = decoder(text[start : start + 32])
            logits[:, model.mask] = -torch.inf
            decoder.keep()
            chances = logits.log_softmax(dim=-1)
            wanted += [float(chances[i, text[start + i]]) for i in range(32)]
        np.testing.assert_allclose(given, wanted[len(prompt) : len(prompt) + TOKENS], atol=1e-3)


def test_an_answer_may_reach_the_end_of_the_context(nano: dict[str, Any]) -> None:
    prompt = nano["runs"][-1]["prompts"][0]
    assert nano["found"]["runs"][-1]["tokens"] == [reference(nano["model"], prompt, {}, most=6).tokens]


CONFIG = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "hidden_act": "silu", "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "norm_head": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 600000,
    "rope_scaling": None, "partial_rotary_factor": 0.25, "num_experts": 12, "num_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.7, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True, "router_dtype": "fp32", "eos_token_id": 318, "pad_token_id": 318, "mask_token_id": 319,
    "dtype": "float32",
}  # fmt: skip


def test_a_random_checkpoint_of_another_shape_comes_through_the_loader_whole(tmp_path: Path) -> None:
    """Other proportions everywhere, and no tensor near zero: what is not loaded, or elsewhere, changes the scores."""
    dice = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=dice) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        for name, shape in layout.tensor_shapes(CONFIG)
    }
    folder = tmp_path / "random"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = [i * 7 % 300 for i in range(70)]
    run = {"prompts": [prompt], "together": True, "sampling": {"max_tokens": 26, "logprobs": 0, "detokenize": False}}
    got = generate(tmp_path, folder, [run], overlap=False, skip_tokenizer_init=True)["runs"][0]
    model = Dense(CONFIG, tensors)
    assert got["tokens"] == [reference(model, prompt, {}, most=26).tokens]
    decoder = model.decoder()
    for start in (0, 32):
        decoder(prompt[start : start + 32])
        decoder.keep()
    logits = decoder([*prompt[64:], *got["tokens"][0]])
    logits[:, 319] = -torch.inf
    wanted = logits.log_softmax(dim=-1)[6:].gather(1, torch.tensor(got["tokens"][0])[:, None])[:, 0]
    np.testing.assert_allclose(got["logprobs"][0], wanted.numpy(), atol=2e-3)


@pytest.mark.parametrize("lengths", [[32], [70, 32, 5], [1], [64, 64], [33, 0, 2]])
def test_rows_are_taken_apart_where_blocks_end(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    owner, new, short = in_blocks(starts, 32)
    seen = {}
    for row, (whose, start, end, after) in enumerate(zip(owner, new[:-1], new[1:], short, strict=True)):
        assert end - start <= 32, row
        for token in range(start, end):
            seen[token] = (int(whose), int(lengths[whose] - after))
    for row, length in enumerate(lengths):
        for place in range(length):
            assert seen[int(starts[row]) + place] == (row, min(place // 32 * 32 + 32, length))


def configuration(**changes: Any) -> Any:
    """What vLLM hands over, as far as it is looked at."""
    found = {
        "model_config.hf_config.canvas_length": 32, "model_config.max_model_len": 256, "speculative_config": None,
        "parallel_config.pipeline_parallel_size": 1, "lora_config": None, "kv_transfer_config": None,
        "scheduler_config.max_num_batched_tokens": 64, "attention_config.backend": None,
        "attention_config.flash_attn_version": None, "compilation_config.cudagraph_mode": None,
        "cache_config.block_size": 16, "cache_config.user_specified_block_size": False,
        "cache_config.enable_prefix_caching": True, "diffusion_config.canvas_length": 32, **changes,
    }  # fmt: skip
    root = SimpleNamespace()
    for path, what in found.items():
        *parents, name = path.split(".")
        place = root
        for parent in parents:
            place.__dict__.setdefault(parent, SimpleNamespace())
            place = getattr(place, parent)
        setattr(place, name, what)
    return root


def test_the_engine_s_configuration_is_completed() -> None:
    config = configuration()
    registration.EngineConfig.verify_and_update_config(config)
    assert config.cache_config.block_size == 32
    assert config.attention_config.use_non_causal
    assert config.scheduler_config.scheduler_cls == registration.SCHEDULER


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_config.max_model_len": 250}, "Take 224"),
        ({"speculative_config": 1}, "speculation"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline"),
        ({"lora_config": 1}, "LoRA"),
        ({"kv_transfer_config": 1}, "KV transfer"),
        ({"scheduler_config.max_num_batched_tokens": 16}, "at least 32"),
        ({"attention_config.backend": SimpleNamespace(name="FLASHINFER")}, "FLASH_ATTN or TRITON_ATTN"),
        ({"compilation_config.cudagraph_mode": SimpleNamespace(name="FULL")}, "FULL_AND_PIECEWISE"),
        ({"cache_config.user_specified_block_size": True}, "--block-size 32"),
        ({"diffusion_config.canvas_length": 16}, "--diffusion-config"),
    ],
    ids=str,
)
def test_what_blocks_cannot_do_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registration.EngineConfig.verify_and_update_config(configuration(**change))


def test_a_published_configuration_is_read_without_what_it_leaves_unsaid() -> None:
    published = {key: given for key, given in CONFIG.items() if key != "mask_token_id"}
    config = registration.LLaDA2MoeConfig(**published)
    assert (config.canvas_length, config.mask_token_id, config.use_rmsnorm) == (32, 156895, True)
    rope = {"rope_type": "default", "rope_theta": 600000, "partial_rotary_factor": 0.25}
    assert config.rope_parameters == rope


def test_a_graph_over_rows_longer_than_a_block_is_refused() -> None:
    """It would replay the rows of its capture: silently wrong attention, that is, garbage."""
    model_state: Any = state.LLaDA2ModelState.__new__(state.LLaDA2ModelState)
    model_state.block, model_state._full = 32, "FULL"
    batch = SimpleNamespace(
        num_reqs=1, num_reqs_after_padding=1, num_tokens=64, num_tokens_after_padding=64,
        query_start_loc=torch.tensor([0, 64]), query_start_loc_np=np.array([0, 64], np.int32),
        seq_lens=torch.tensor([64]), seq_lens_cpu_upper_bound=torch.tensor([64]),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="longer than a block"):
        model_state.prepare_attn(batch, "FULL", (torch.zeros(1, 2),), torch.zeros(1, 64), None, None)
