"""Relaxed acceptance as a client meets it: per request, labelled, counted, and never on greedy requests."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served

MODEL = "tiny-hybrid"
LOOSE = {"accept": "threshold", "accept_eps": 0.01}


def post(served: Served, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "The river bends", "max_tokens": 48, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{served.url}{path}", json={**body, **options}, timeout=300)


def tokens(answer: httpx.Response) -> list[int]:
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def counted(served: Served, name: str, rule: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    return sum(
        sample.value
        for family in text_string_to_metric_families(served.metrics())
        for sample in family.samples
        if sample.name == f"thor_spec:{name}_tokens_total" and sample.labels["rule"] == rule
    )


def test_answers_say_which_rule_they_came_by(hybrid: Served) -> None:
    header = "x-thor-spec-accept"
    assert post(hybrid, max_tokens=1).headers[header] == "exact"
    assert post(hybrid, max_tokens=1, thor_spec=LOOSE).headers[header] == "threshold eps=0.01"
    said = post(hybrid, max_tokens=1, thor_spec={"accept": "typical"}).headers[header]
    assert said == "typical eps=0.09 delta=0.3"
    assert header not in httpx.get(f"{hybrid.url}/v1/models", timeout=60).headers


SAID = [{"role": "user", "content": "Say hello."}]
BODIES = {
    "/v1/completions": {"prompt": "The river bends", "max_tokens": 8},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 8},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 8},
    "/v1/messages": {"messages": SAID, "max_tokens": 8},
    "/invocations": {"messages": SAID, "max_tokens": 8},
    "/v1/chat/completions/batch": {"messages": [SAID, SAID], "max_tokens": 8},
}
NO_TOKENS = {
    *("/tokenize", "/detokenize", "/ping", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/generative_scoring", "/v1/systemone"),  # the prompt's own probabilities
}
"""What vLLM's server takes besides: no drafts are taken there."""


@pytest.mark.parametrize("path", BODIES)
def test_each_way_in_is_labelled_with_what_the_engine_did(hybrid: Served, path: str) -> None:
    body = {"model": MODEL, "temperature": 1.0, **BODIES[path]}
    header = "x-thor-spec-accept"
    assert httpx.post(f"{hybrid.url}{path}", json=body, timeout=300).raise_for_status().headers[header] == "exact"
    before = counted(hybrid, "drafted", "threshold")
    asked = httpx.post(f"{hybrid.url}{path}", json={**body, "thor_spec": LOOSE}, timeout=300)
    if path.endswith("/batch"):  # where vLLM cannot pass it on
        assert asked.status_code == 400
        assert "takes no thor_spec options" in asked.text
    else:
        assert asked.raise_for_status().headers[header] == "threshold eps=0.01"
        assert counted(hybrid, "drafted", "threshold") > before


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "written",
    [
        lambda text: text.encode(),
        lambda text: text.replace("_", "\\u005f").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-8-sig"),
    ],
    ids=["plain", "escaped", "utf-16", "utf-8-sig"],
)
def test_nobody_gets_past_the_label(hybrid: Served, path: str, written: Any) -> None:
    """By naming the engine's own arguments, however JSON is written."""
    body = {"model": MODEL, "temperature": 1.0, **BODIES[path], "vllm_xargs": {"thor_spec_accept": "typical"}}
    before = counted(hybrid, "drafted", "typical")
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{hybrid.url}{path}", content=written(json.dumps(body)), headers=headers, timeout=300)
    assert answer.status_code == 400
    assert "thor_spec_accept" in answer.text
    assert counted(hybrid, "drafted", "typical") == before


def test_every_way_in_is_known(hybrid: Served) -> None:
    paths = httpx.get(f"{hybrid.url}/openapi.json", timeout=60).json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == {*BODIES, *NO_TOKENS}


def test_a_greedy_request_is_never_relaxed(hybrid: Served) -> None:
    exact, loose = (tokens(post(hybrid, temperature=0, thor_spec=rule)) for rule in ({}, LOOSE))
    assert exact == loose


def test_a_relaxed_request_takes_more_drafts_a_step(hybrid: Served) -> None:
    """Counted by the engine itself; the seeds make both runs repeatable."""
    lengths = {}
    for rule in ({"accept": "exact"}, LOOSE):
        names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "accepted_tokens")]
        before = [hybrid.metric(name) for name in names]
        first = [tokens(post(hybrid, temperature=1.0, seed=seed, thor_spec=rule)) for seed in range(4)]
        drafts, accepted = (hybrid.metric(name) - was for name, was in zip(names, before, strict=True))
        lengths[rule["accept"]] = accepted / drafts
        again = [tokens(post(hybrid, temperature=1.0, seed=seed, thor_spec=rule)) for seed in range(4)]
        assert first == again
    assert lengths["threshold"] > 1.3 * lengths["exact"]


def test_requests_of_all_rules_share_a_batch(hybrid: Served, client: openai.OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rules = [{}, LOOSE, {"accept": "typical"}, {"accept": "exact"}]
    alone = tokens(post(hybrid, temperature=0))
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(post, hybrid, temperature=t, seed=1, thor_spec=rule) for rule in rules for t in (0, 0.9)]
        answers = [tokens(each.result()) for each in made]
    assert all(len(answer) == 48 for answer in answers)
    # A neighbour may tip a near tie, so most and not all greedy ones must be the same.
    assert sum(answer == alone for answer in answers[::2]) >= 2
    assert client.models.list().data


def test_the_engine_counts_by_rule(hybrid: Served) -> None:
    before = [counted(hybrid, name, "threshold") for name in ("drafted", "accepted", "relaxed", "rejected")]
    tokens(post(hybrid, temperature=1.0, seed=3, thor_spec=LOOSE))
    after = [counted(hybrid, name, "threshold") for name in ("drafted", "accepted", "relaxed", "rejected")]
    drafted, accepted, relaxed, rejected = (now - was for now, was in zip(after, before, strict=True))
    assert drafted > accepted >= relaxed > 0
    assert rejected > 0
    assert 7 * 48 >= drafted >= accepted + rejected


def test_logprobs_are_the_targets_own(hybrid: Served) -> None:
    """Forcing the emitted tokens through the target as a prompt gives the same logits, or all but."""
    answer = post(hybrid, temperature=1.0, seed=5, logprobs=1, thor_spec=LOOSE, max_tokens=16).raise_for_status().json()
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    ids = answer["choices"][0]["token_ids"]
    prompt = post(hybrid, max_tokens=1, temperature=0).json()["choices"][0]["prompt_token_ids"]
    forced = post(hybrid, prompt=prompt + ids, max_tokens=1, temperature=0, prompt_logprobs=0).raise_for_status().json()
    theirs = [
        step[str(token)]["logprob"]
        for token, step in zip(ids, forced["choices"][0]["prompt_logprobs"][len(prompt) :], strict=True)
    ]
    assert values == pytest.approx(theirs, abs=0.2)


def test_the_openai_client_sends_a_rule_as_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0.7,
        extra_body={"thor_spec": {"accept": "typical", "accept_eps": 0.2}},
    )  # fmt: skip
    assert answer.headers["x-thor-spec-accept"] == "typical eps=0.2 delta=0.3"
    with pytest.raises(openai.BadRequestError, match="accept='loose' is not one of"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"thor_spec": {"accept": "loose"}})
    with pytest.raises(openai.BadRequestError, match="must be an object"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"thor_spec": "typical"})
