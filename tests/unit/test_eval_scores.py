"""Scores against other people's code, and against the slowest obvious version."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import longppl.longppl as published
import numpy as np
import pytest
import torch
from statsmodels.stats.proportion import proportion_confint

from thor_spec.errors import ConfigError
from thor_spec.eval import longppl, perplexity, wilson
from thor_spec.eval.run import Answers

NATIVE = 64


def test_wilson_equals_statsmodels() -> None:
    rng = random.Random(0)
    cases = [(rng.randint(0, n), n) for n in (rng.randint(1, 400) for _ in range(300))]
    for hits, trials in [*cases, (0, 5), (5, 5), (4, 5), (14, 15), (13, 13), (16, 16)]:
        for confidence in (0.95, 0.99):
            wanted = proportion_confint(hits, trials, alpha=1 - confidence, method="wilson")
            assert wilson.interval(hits, trials, confidence=confidence) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("hits", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_no_share_no_interval(hits: int, trials: int) -> None:
    with pytest.raises(ConfigError, match="no share"):
        wilson.interval(hits, trials)


def test_bands_hold_every_scored_position_once() -> None:
    rng = np.random.default_rng(0)
    rows = [-rng.random(4 * NATIVE - 2, dtype=np.float32) for _ in range(3)]
    found = perplexity.bands(rows, NATIVE)
    assert [(b["start"], b["stop"]) for b in found] == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 255)]
    assert sum(b["tokens"] for b in found) == sum(map(len, rows))
    for band in found:
        losses = [-float(row[p - 1]) for row in rows for p in range(max(band["start"], 1), band["stop"])]
        assert band["ppl"] == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_far_perplexity_is_that_of_positions_from_native_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "BLOCK", 16)
    rng = np.random.default_rng(1)
    control = [-rng.random(200, dtype=np.float32) for _ in range(4)]
    worse = [row - 0.25 for row in control]
    found = perplexity.far(worse, control, NATIVE)
    assert found is not None
    losses = [-float(row[p - 1]) for row in worse for p in range(NATIVE, 201)]
    assert found["tokens"] == len(losses)
    assert found["ppl"] == pytest.approx(math.exp(sum(losses) / len(losses)))
    assert found["ppl95"][0] < found["ppl"] < found["ppl95"][1]
    # On the same tokens the difference is exact, although the perplexities vary.
    assert found["ratio"] == pytest.approx(math.exp(0.25), rel=1e-6)
    assert found["ratio95"] == pytest.approx([math.exp(0.25)] * 2, rel=1e-5)
    few = perplexity.far(worse[:1], control[:1], NATIVE + 40)
    assert few is not None
    assert (few["blocks"], few["ppl95"], few["ratio95"]) == (7, None, None)
    near = [np.concatenate([row[: NATIVE - 1] - 9, row[NATIVE - 1 :]]) for row in worse]
    assert perplexity.far(near, control, NATIVE) == found
    assert perplexity.far([row[: NATIVE - 1] for row in worse], None, NATIVE) is None


class Model:
    """A causal model that knows little: each token is guessed from the sums of those before it."""

    device = "cpu"

    def __init__(self, seed: int, vocabulary: int = 23) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator)

    def __call__(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.table[ids].cumsum(1).sin() * 6)

    def logprobs(self, ids: list[int], first: int = 1) -> np.ndarray:
        logits = self(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        picked = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return picked[first - 1 :].numpy().astype(np.float32)


class Letters:
    """A tokenizer of pieces of a fixed width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def pieces(self, text: str) -> list[str]:
        return [text[i : i + self.width] for i in range(0, len(text), self.width)]

    def ids(self, text: str) -> list[int]:
        return [sum(piece.encode()) % 23 for piece in self.pieces(text)]

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [(i, min(i + self.width, len(text))) for i in range(0, len(text), self.width)]

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([self.ids(text)]), "offset_mapping": torch.tensor([self.spans(text)])}


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2)])
# Lengths that leave no window of a single token, on which the package fails.
@pytest.mark.parametrize("length", [60, 137, 1010])
def test_longppl_equals_the_published_package(tmp_path: Path, widths: tuple[int, int], length: int) -> None:
    rng = random.Random(f"{widths}{length}")
    theirs, ours = Letters(widths[0]), Letters(widths[1])
    judge, model = Model(1), Model(2)
    text = "".join(rng.choices("abcdefghij ", k=length))
    wanted = published.compute_longppl(
        text,
        model,
        judge,
        ours,
        theirs,
        trunc_len=16,
        sliding_window=7,  # type: ignore[arg-type]
    )
    ids = theirs.ids(text)
    for request in longppl.evaluator_requests(0, ids, short=16, window=7):
        np.save(tmp_path / f"{request.id}.npy", judge.logprobs(list(request.tokens), request.first))
    found = longppl.keys(Answers(tmp_path, {}), 0, len(ids), short=16, window=7)
    spans = longppl.merged([theirs.spans(text)[p] for p in found])
    keyed = longppl.positions(ours.spans(text), spans)
    row = model.logprobs(ours.ids(text))
    scored = longppl.score({0: row}, {0: keyed}, native=40)
    assert scored["ppl"] == pytest.approx(float(wanted["ppl"]), rel=1e-5)
    assert scored["key_tokens"] == (wanted["n_key_token"] or 0)
    assert scored["key_tokens"] > 0 or length < 1000
    if wanted["longppl"] is not None:
        assert scored["longppl"] == pytest.approx(float(wanted["longppl"]), rel=1e-5)
    far = [float(row[p - 1]) for p in keyed if p >= 40]
    assert scored["far_key_tokens"] == len(far)
    if far:
        assert scored["far_longppl"] == pytest.approx(math.exp(-sum(far) / len(far)))
