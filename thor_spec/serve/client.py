"""A served engine as those see it who judge it: token ids in, token ids and log-probabilities out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from thor_spec.errors import ConfigError, ThorSpecError

TIMEOUT_S = 1800.0
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish: str
    rule: str
    """What the server says about how drafts were taken; empty if it says nothing."""
    logprobs: tuple[float, ...] = ()
    """Of each token, where they were asked for."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest tokens at each place, with theirs."""
    cached: int | None = None
    """Tokens of the prompt that came from the prefix cache; None where the server does not tell."""


@dataclass(frozen=True, slots=True)
class Forced:
    """What the target says about one token that it is given: its log-probability, and the likeliest tokens'."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Likeliest first."""

    @property
    def gap(self) -> float:
        """How far it lies below the likeliest, in nats; 0 for that one."""
        return self.top[0][1] - self.logprob


class Server:
    """A server's address and what it serves.

    Raises: ConfigError, where none answers there, or something else than vLLM does.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        # Plain HTTP in general: no certificates to load.
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, verify=self.url.startswith("https"))
        try:
            card = self._get("/v1/models").json()["data"][0]
            self.model: str = model or card["id"]
        except ThorSpecError as error:
            raise ConfigError(f"{error} Start one, or name another address with --url.") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self.url}/v1/models lists no models as vLLM does, so nothing can be asked there. "
                "Name the address of a server that `thor-spec serve` or vLLM runs."
            ) from error
        self.context: int = card.get("max_model_len") or 0
        self.root: str = card.get("root") or self.model
        """Where the server has its files from; a folder, if it runs on this machine."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's configuration, where its files are on this machine; else empty."""
        try:
            config: dict[str, Any] = json.loads((Path(self.root) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        nested = config.get("text_config")
        return nested if isinstance(nested, dict) else config

    def metrics(self) -> str:
        """Return the text of ``/metrics``."""
        return self._get("/metrics").text

    def version(self) -> str:
        """Return vLLM's version."""
        return str(self._get("/version").json().get("version"))

    def complete(self, prompt: Prompt, **options: Any) -> Answer:
        """Return the completion of one prompt; greedy and to the full length, unless ``options`` say otherwise."""
        if options.get("logprobs"):
            options = {"return_tokens_as_token_ids": True, **options}
        response = self.post("/v1/completions", self.body(prompt, **options))
        answer = response.json()
        choice = answer["choices"][0]
        said = choice.get("logprobs") or {}
        tops = [
            [(int(t.removeprefix("token_id:")), v) for t, v in place.items()]
            for place in said.get("top_logprobs") or ()
        ]
        return Answer(
            prompt=tuple(choice["prompt_token_ids"]),
            tokens=tuple(choice["token_ids"]),
            text=choice["text"],
            finish=str(choice["finish_reason"]),
            rule=response.headers.get("x-thor-spec-accept", ""),
            logprobs=tuple(said.get("token_logprobs") or ()),
            top=tuple(map(tuple, tops)),
            cached=((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def complete_all(self, prompts: Iterable[Prompt], *, at_once: int = 1, **options: Any) -> list[Answer]:
        """Return the completions of several prompts, in their order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **options), prompts))

    def drawn_all(self, asked: Iterable[tuple[Prompt, int]], *, at_once: int, **options: Any) -> list[Answer]:
        """Return sampled completions of prompts, each with the seed that goes with it."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda pair: self.complete(pair[0], seed=pair[1], **options), asked))

    def forced_all(self, answers: Iterable[Answer], *, at_once: int = 1, top: int = 1) -> list[list[Forced]]:
        """Return what the target says about the tokens of each answer."""

        def one(answer: Answer) -> list[Forced]:
            return self.forced([*answer.prompt, *answer.tokens], len(answer.prompt), top=top)

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, answers))

    def forced(self, tokens: Sequence[int], start: int, *, top: int = 1) -> list[Forced]:
        """Return what the target says about ``tokens[start:]``, each after those before it, without speculation."""
        body = self.body(list(tokens), max_tokens=1, prompt_logprobs=top)
        found = self.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
        if not found or len(found) != len(tokens):
            raise ThorSpecError(f"{self.url} gave no log-probabilities of a prompt. Is it vLLM?")
        steps = []
        for token, entries in zip(tokens[start:], found[start:], strict=True):
            ranked = sorted(((int(key), entry["logprob"]) for key, entry in entries.items()), key=lambda e: -e[1])
            steps.append(Forced(token, entries[str(token)]["logprob"], tuple(ranked[: max(top, 1)])))
        return steps

    def spread(self, prompt: Sequence[int]) -> float:
        """Return the standard deviation of the next token's logits over the whole vocabulary.

        Raises: ConfigError, where the server gives no whole vocabulary.
        """
        size = self.text_config.get("vocab_size")
        if size is None:
            raise ConfigError(f"The files of {self.model} are not on this machine. Say what a tie is: --tie-gap.")
        body = self.body(list(prompt), max_tokens=1, logprobs=size, return_tokens_as_token_ids=True)
        try:
            answer = self.post("/v1/completions", body).json()
        except ThorSpecError as error:
            raise ConfigError(
                f"{self.url} does not tell the logits of all {size} tokens, by which ties are recognized ({error}). "
                "Start it with -- --max-logprobs -1, or say what a tie is: --tie-gap."
            ) from error
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        values = [value for value in top.values() if value > -1e30]
        mean = sum(values) / len(values)
        return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5)

    def body(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """Return a request's body."""
        return {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Return the answer to one request. Raises: ThorSpecError, with the server's words."""
        try:
            response = self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise ThorSpecError(f"{self.url}{path} failed: {why(error)}.") from error
        if response.status_code != httpx.codes.OK:
            raise ThorSpecError(f"{self.url}{path} answered {response.status_code}: {response.text[:300]}")
        return response

    def stream(self, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        """Return the context of one streamed answer; ``options`` are the HTTP client's."""
        return self._client.stream("POST", path, json=body, **options)

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path).raise_for_status()
        except httpx.HTTPError as error:
            raise ThorSpecError(
                f"{self.url}{path} does not answer ({why(error)}). Is a server running there?"
            ) from error


def why(error: httpx.HTTPError) -> str:
    """Return what went wrong with a request, for a sentence that goes on."""
    if isinstance(error, httpx.HTTPStatusError):  # whose own words fill two lines, with a link
        return f"{error.response.status_code} {error.response.reason_phrase}".rstrip()
    return str(error).rstrip(".") or type(error).__name__
