"""The trainings in toy size: they learn, they resume to the bit, they end in time, and they leave what they should."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from thor_spec.errors import ConfigError
from thor_spec.nano import drafter as nano_drafter
from thor_spec.train import data, denoising, drafting, hybrid, language, loop, targets
from thor_spec.train.shapes import DiffusionShape, HybridShape
from tools.train_nano import __main__ as command

CPU = torch.device("cpu")
SMOKE = ("--smoke", "--device", "cpu", "--tokens", "512")


def quiet(_text: str) -> None:
    pass


def train_hybrid(corpus: data.Corpus, folder: Path, steps: int, **more: Any) -> tuple[hybrid.Hybrid, loop.Run]:
    recipe = dataclasses.replace(language.SMOKE, tokens=256, phases=((0.8, 64), (1.0, 128)))
    shape = HybridShape(vocabulary=corpus.vocabulary, **language.SMOKE_SHAPE)
    folder.mkdir(exist_ok=True)
    state = folder / "state"
    return language.train(corpus, shape, recipe, loop.Budget(steps=steps), CPU, 1, state, quiet, **more)


def train_llada(corpus: data.Corpus, folder: Path, steps: int, **more: Any) -> tuple[Any, loop.Run]:
    shape = DiffusionShape(vocabulary=corpus.vocabulary, **denoising.SMOKE_SHAPE)
    recipe = dataclasses.replace(denoising.SMOKE, tokens=256)
    folder.mkdir(exist_ok=True)
    state = folder / "state"
    return denoising.train(corpus, shape, recipe, loop.Budget(steps=steps), CPU, 1, state, quiet, **more)


@pytest.mark.parametrize("train", [train_hybrid, train_llada])
def test_a_resumed_run_gives_the_same_bytes(train: Any, packed: data.Corpus, tmp_path: Path) -> None:
    whole, run = train(packed, tmp_path / "whole", 10)
    train(packed, tmp_path / "parts", 10, stop_after=4)
    torch.randn(7)  # whatever was drawn in between must not matter
    parts, resumed = train(packed, tmp_path / "parts", 10, resume=True)
    assert (run.step, run.tokens) == (resumed.step, resumed.tokens) == (10, 10 * 256)
    want, got = whole.state_dict(), parts.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_another_seed_gives_other_weights(packed: data.Corpus, tmp_path: Path) -> None:
    rows = [data.rows(packed.segment("train"), 2, 16, seed=seed, step=0) for seed in (1, 2)]
    assert not torch.equal(*rows)
    assert torch.equal(rows[0], data.rows(packed.segment("train"), 2, 16, seed=1, step=0))


def test_the_budget_is_used_and_kept(packed: data.Corpus, tmp_path: Path) -> None:
    begun = time.monotonic()
    shape = HybridShape(vocabulary=packed.vocabulary, **language.SMOKE_SHAPE)
    recipe = dataclasses.replace(language.SMOKE, tokens=256)
    _, run = language.train(packed, shape, recipe, loop.Budget(seconds=1.5), CPU, 1, tmp_path / "state", quiet)
    assert run.step > 2
    assert run.seconds >= 1.5
    assert time.monotonic() - begun < 30  # no timing test: a loop that ignores its budget would run for hours
    rates = [entry["rate"] for entry in run.history]
    assert rates[-1] < 0.5 * recipe.rate


def test_a_slow_first_step_does_not_skip_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    model = torch.nn.Linear(1, 1)
    optimizers = loop.optimizers(model, 1.0, muon=False, weight_decay=0.0)
    rates = []

    def losses(step: int, _progress: float) -> dict[str, torch.Tensor]:
        clock[0] += 60.0 if step == 0 else 1.0
        rates.append(optimizers[0].param_groups[0]["lr"])
        return {"loss": model(torch.ones(1, 1)).sum()}

    run = loop.Loop(
        model=model, optimizers=optimizers, rate=loop.Rate(peak=1.0, warm_up=0.1), budget=loop.Budget(seconds=160.0),
        losses=losses, tokens_per_step=lambda _progress: 1, state_file=tmp_path / "state", say=quiet,
    ).train()  # fmt: skip
    assert run.step == 101  # 60 s and 100 times 1 s
    assert rates[:2] == [pytest.approx(1e-3)] * 2
    assert rates[6] < 0.5 < rates[12]
    assert rates[-1] < 0.05


def test_a_budget_is_steps_or_time() -> None:
    for wrong in ({}, {"steps": 1, "seconds": 1.0}, {"steps": 0}):
        with pytest.raises(ConfigError):
            loop.Budget(**wrong)


@pytest.mark.parametrize("decay_from", [None, 0.4])
def test_the_rate_rises_and_falls(decay_from: float | None) -> None:
    rate = loop.Rate(peak=1.0, decay_from=decay_from)
    values = [rate.at(i / 1000) for i in range(1001)]
    assert max(values) == pytest.approx(1.0, rel=1e-3)
    assert values[0] < 0.01
    assert values[-1] == pytest.approx(rate.floor)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    broken = loop.Loop(
        model=model, optimizers=loop.optimizers(model, 0.1, muon=False, weight_decay=0.0), rate=loop.Rate(peak=0.1),
        budget=loop.Budget(steps=3), losses=lambda _step, _progress: {"loss": model.weight.sum() * torch.nan},
        tokens_per_step=lambda _progress: 1, state_file=tmp_path / "state", say=quiet,
    )  # fmt: skip
    with pytest.raises(FloatingPointError):
        broken.train()


# The commands


@pytest.fixture(scope="module")
def trained(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smoke-sized nano-hybrid."""
    out = tmp_path_factory.mktemp("out")
    command.main(
        ["hybrid", "--data", str(mini), "--out", str(out), *SMOKE, "--steps", "40", "--state", str(out / "state")]
    )
    return out


def test_nano_hybrid_learns_and_is_described(trained: Path) -> None:
    folder = trained / "nano-hybrid"
    metrics = json.loads((folder / "metrics.json").read_text())
    first, last = metrics["history"][0]["loss"], metrics["history"][-1]["loss"]
    assert last < 0.9 * first
    assert metrics["steps"] == 40
    card = (folder / "README.md").read_text()
    assert "smoke run" in card
    assert "| mini | 1.0 | PSF-2.0 |" in card
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }


def test_what_a_command_left_is_a_checkpoint_for_serving(trained: Path) -> None:
    from thor_spec.serve.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("nano-hybrid", trained / "nano-hybrid")
    assert checkpoint.is_hybrid
    assert checkpoint.has_chat_template


def test_nano_dflash_learns_from_what_its_target_writes(trained: Path, mini: Path) -> None:
    hybrid_folder = str(trained / "nano-hybrid")
    arguments = ["--data", str(mini), "--out", str(trained), *SMOKE, "--steps", "30", "--state", str(trained / "state")]
    command.main(["dflash", *arguments, "--target", hybrid_folder, "--sequences", "6"])
    metrics = json.loads((trained / "nano-dflash" / "metrics.json").read_text())
    assert metrics["sequences"] == 6
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    assert set(metrics["acceptance"]["code"]) == {f"K={k}, T={t}" for k in (7, 15) for t in ("0", "0.7")}
    assert "Tokens per step" in (trained / "nano-dflash" / "README.md").read_text()
    assert nano_drafter.load(trained / "nano-dflash").shape.target_layers == 4


def test_nano_llada_learns_to_denoise(mini: Path, tmp_path: Path) -> None:
    command.main(
        ["llada", "--data", str(mini), "--out", str(tmp_path), *SMOKE, "--steps", "40", "--state", str(tmp_path)]
    )
    metrics = json.loads((tmp_path / "nano-llada" / "metrics.json").read_text())
    assert metrics["history"][-1]["loss"] < 0.9 * metrics["history"][0]["loss"]
    assert "errors corrected" in (tmp_path / "nano-llada" / "README.md").read_text()


# Drafters


def speculate(
    target: targets.Target, module: nano_drafter.Drafter, prompt: list[int], drafts: int, stop: int
) -> list[int]:
    """Return how many drafts each step of real greedy speculation accepts, recomputing everything at each step."""
    ids = torch.tensor([prompt])
    ids = torch.cat([ids, target.logits(ids)[:, -1:].argmax(dim=-1)], dim=1)
    accepted = []
    while ids.shape[1] < stop:
        anchor = ids.shape[1] - 1
        features = target.features(ids[:, :anchor], module.shape.target_layer_ids)
        features = torch.cat([features, torch.zeros_like(features[:, :1])], dim=1)  # not seen: the mask ends before
        logits = drafting.draft_logits(target, module, ids, features, torch.tensor([[anchor]]), drafts + 1)
        guess = torch.cat([ids, logits[0].argmax(dim=-1)], dim=1)
        choice = target.logits(guess).argmax(dim=-1)[0, anchor:]
        agree = int((guess[0, anchor + 1 :] == choice[:-1]).long().cumprod(dim=0).sum())
        accepted.append(agree)
        ids = torch.cat([guess[:, : anchor + 1 + agree], choice[None, agree : agree + 1]], dim=1)
    return accepted


@torch.no_grad()
def test_acceptance_is_that_of_speculation(trained: Path, packed: data.Corpus) -> None:
    target = targets.open_target(trained / "nano-hybrid", "cpu")
    recipe = drafting.DraftRecipe(layers=1, heads=2, kv_heads=1, head_dim=32, intermediate=32, taps=2, prompt=24,
                                  sequences=16, new=40, writing_batch=8, batch=4, anchors=4)  # fmt: skip
    shape = drafting.shape_for(target, recipe, mask_token_id=packed.marks().mask, max_length=256)
    pool = drafting.write_pool(target, packed.segment("train"), recipe, 1, None, quiet)
    assert pool.shape == (16, 64)
    with torch.enable_grad():
        module, _ = drafting.train(
            target, pool, shape, recipe, loop.Budget(steps=40), 1, trained / "draft.state", quiet
        )
    prompt, drafts, new = packed.prompts()["code"][0][:40], 7, 60
    ids = target.write_rows([prompt], new, 0.0, 0)
    found = drafting.acceptance(target, module, ids, torch.tensor([len(prompt)]), new=new, drafts=drafts)
    steps = speculate(target, module, prompt, drafts, len(prompt) + new)[: found["steps"]]
    assert sum(steps) > 0
    assert found["tau"] == pytest.approx(1 + sum(steps) / len(steps), abs=1e-3)


def test_a_drafter_for_a_transformers_target_sees_the_same_features(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = targets.open_target(trained / "nano-hybrid", "cpu")
    theirs = targets.TransformersTarget(
        AutoModelForCausalLM.from_pretrained(trained / "nano-hybrid", dtype=torch.float32)
    )
    ids = torch.randint(0, 600, (2, 30))
    want, got = theirs.features(ids, (0, 3)), ours.features(ids, (0, 3))
    assert torch.allclose(want, got, atol=1e-4)
    assert torch.equal(theirs.write(ids, 5, 0.0, 0), ours.write(ids, 5, 0.0, 0))


def test_a_user_trains_a_drafter_for_a_target(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from thor_spec.cli.main import main

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("def f(x):\n    return x + 1\n\n" * 150)
    size = ["--steps", "3", "--sequences", "4", "--new-tokens", "24", "--layers", "1", "--device", "cpu"]
    where = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "drafter")]
    with pytest.raises(SystemExit) as ended:
        main(["train", "drafter", str(trained / "nano-hybrid"), *where, *size, "--json"])
    assert not ended.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 3
    assert set(report["tau"]) == {f"K={k}, T={t}" for k in (7, 15) for t in ("0", "0.7")}
    assert nano_drafter.load(tmp_path / "drafter").shape.hidden == 64


def test_too_little_text_is_told(trained: Path, tmp_path: Path) -> None:
    from thor_spec.train.user import Request, train_drafter

    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="too few"):
        train_drafter(
            Request(target=trained / "nano-hybrid", text=tmp_path / "a.txt", out=tmp_path, device="cpu"), quiet
        )


def test_a_mask_must_be_free() -> None:
    from thor_spec.train.user import mask_id

    class Full:
        mask_token_id = None

        def __len__(self) -> int:
            return 100

    assert mask_id(None, Full(), 128) == 127
    assert mask_id(5, Full(), 100) == 5
    for given in (None, 100):
        with pytest.raises(ConfigError, match="vocabulary"):
            mask_id(given, Full(), 100)
