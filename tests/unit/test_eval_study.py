"""From a command to its record, with an engine whose answers are a hash of what it rotates by."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thor_spec import record
from thor_spec.errors import ConfigError
from thor_spec.eval import plots, study
from thor_spec.eval.run import Answers
from thor_spec.eval.study import Study
from thor_spec.eval.text import Tokenizer
from thor_spec.nano import shipped

MODEL = str(shipped.find(shipped.TARGET))
pytestmark = pytest.mark.skipif(shipped.find(shipped.TARGET) is None, reason="not run: nano-hybrid is not shipped here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put answers in the place of engines; return the names of the arms that were asked."""
    names: list[str] = []

    def answer(arms: Mapping[str, Any], requests: Any, out: Path, **_: Any) -> dict[str, Answers]:
        tokenizer = Tokenizer(Path(MODEL))
        for name, plan in arms.items():
            names.append(name)
            folder = out / "arms" / name
            folder.mkdir(parents=True, exist_ok=True)
            for request in requests:
                assert len(request.tokens) + max(request.max_tokens, 1) <= plan.context
                rng = np.random.default_rng(zlib.crc32(f"{name}{request.id}".encode()))
                if request.max_tokens:
                    prompt = tokenizer.decode(request.tokens)
                    right = prompt.partition(" is: ")[2].partition(".")[0]
                    words = right if rng.random() < (0.9 if name == "default" else 0.4) else "no"
                    (folder / f"{request.id}.json").write_text(json.dumps(tokenizer.encode(words).ids))
                else:
                    # A loss that falls with the context, so that some tokens are key tokens.
                    losses = rng.random(len(request.tokens) - request.first, dtype=np.float32) * 2
                    losses += 3.0 if request.id.startswith("short") else 0.0
                    np.save(folder / f"{request.id}.npy", -losses)
        return {name: Answers(out / "arms" / name, {"target": {"type": name}}) for name in arms}

    monkeypatch.setattr(study, "ask", answer)
    return names


def made(out: Path, **changes: Any) -> Study:
    base = {
        "model": MODEL,
        "ropes": ["yarn", "drope"],
        "lengths": [12288],
        "corpus": "synthetic",
        "samples": 2,
        "out": out,
    }
    return Study(**{**base, **changes, "tell": lambda _: None})


def test_perplexity_has_the_control_and_the_same_record_twice(asked: list[str], tmp_path: Path) -> None:
    what = made(tmp_path, lengths=[4096, 12288])
    content = record.read(study.ppl(what)).content
    assert asked == ["default", "yarn", "identity_beyond_native"]
    assert content["native"] == 8192
    asked_for = content["arms"]["yarn"]["asked"]
    assert (asked_for["context"], asked_for["rope"]["factor"]) == (12288, 1.5)
    assert content["arms"]["yarn"]["effective"] == {"target": {"type": "yarn"}}
    assert content["summary"]["yarn"]["12288"]["far"]["ratio95"] is None  # of two blocks
    far = content["summary"]["yarn"]["12288"]["far"]
    assert far["tokens"] == 2 * (12288 - 1 - 8192)
    assert content["summary"]["yarn"]["4096"]["far"] is None
    again = record.read(study.ppl(what)).content
    assert {**again, "provenance": None} == {**content, "provenance": None}
    ((head, rows),) = plots.tables(content)
    assert len(rows) == 6
    for row in rows:  # a short text has tokens within the native context only
        shown = dict(zip(head, row, strict=True))
        near = [b for b in content["summary"][row[0]][row[1]]["bands"] if b["stop"] <= 8192]
        assert sum(b["tokens"] for b in near) == 2 * (min(int(row[1]) - 1, 8192) - 1)
        assert min(b["ppl"] for b in near) <= float(shown["native ppl"]) * 1.001
        assert float(shown["native ppl"]) <= max(b["ppl"] for b in near) * 1.001
        assert (shown["far ppl"] == "-") == (row[1] == "4096")
    assert all(len(row) == len(head) for row in rows)
    assert plots.save(content, tmp_path) == ["plot-0.svg", "plot-1.svg"]
    lines = (tmp_path / "instances.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2 * 2


def test_longppl_maps_keys_and_parts_the_far_ones(asked: list[str], tmp_path: Path) -> None:
    path = study.long_ppl(made(tmp_path, samples=1), MODEL, {"context": 12288, "rope": "default", "rope_factor": 1.5})
    content = record.read(path).content
    assert asked[0] == "evaluator"
    assert content["evaluator"]["is_tested_model"]
    row = content["summary"]["default"]
    assert 0 < row["far_key_tokens"] < row["key_tokens"]
    keys = json.loads((tmp_path / "instances.jsonl").read_text().splitlines()[0])["keys"]
    assert min(keys) >= 4096
    assert sum(key >= 8192 for key in keys) == row["far_key_tokens"]
    assert plots.tables(content)[0][1][0][0] == "default"
    with pytest.raises(ConfigError, match="which takes 8192"):
        study.long_ppl(made(tmp_path / "b"), MODEL, {})


def test_needles_and_ruler_keep_every_instance(asked: list[str], tmp_path: Path) -> None:
    path = study.needles(made(tmp_path / "n", ropes=["nope"], lengths=[512, 1024], samples=4), [0.0, 1.0])
    content = record.read(path).content
    assert [row["n"] for row in content["summary"]["by_length"]["nope"]] == [8, 8]
    hits = [json.loads(line)["hit"] for line in (tmp_path / "n" / "instances.jsonl").read_text().splitlines()]
    for arm in ("default", "nope"):
        assert sum(hit[arm] for hit in hits) == sum(row["hits"] for row in content["summary"]["by_length"][arm]) > 0
    path = study.ruler_tasks(
        made(tmp_path / "r", ropes=["nope"], lengths=[1024], samples=3), ["vt", "niah_single_1"], {}
    )
    content = record.read(path).content
    assert len(content["summary"]) == 4
    assert "qa_1" in content["not_executed"]
    assert len(plots.tables(content)[0][1]) == 4
    assert plots.save(content, tmp_path) == ["plot-0.svg"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ropes": ["ntk"]}, "--rope ntk"),
        ({"lengths": [32]}, "at least 64"),
        ({"samples": 0}, "--samples 0"),
        ({"factor": 1.0}, "beyond the table"),
        ({"lengths": [10000], "native": 9000}, "more than the 8192"),
    ],
)
def test_what_is_refused(asked: list[str], tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        study.ppl(made(tmp_path, **changes))
