"""The engine of an evaluation: answers a file of requests, one after the other, and keeps each answer at once.

One request at a time, because what else is in a batch changes the last bits of an answer: an evaluation that was
interrupted must come to the same result. Long prompts are computed in the scheduler's chunks.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thor_spec import env, whole_file
from thor_spec.errors import PlatformError
from thor_spec.vllm_plugin import compat, receipt

SERVER_FLAGS = {
    "--host": 1,
    "--port": 1,
    "--middleware": 1,
    "--tool-call-parser": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-prompt-tokens-details": 0,
}
"""Flags of the API server, with the number of their values; an offline engine does not know them."""


def done(folder: Path, request: Mapping[str, Any]) -> bool:
    """Return whether the answer is there."""
    return answer_path(folder, request).exists()


def answer_path(folder: Path, request: Mapping[str, Any]) -> Path:
    """Return where the answer is kept: an array of float32 for ``logprobs``, a list of token ids for ``generate``."""
    return folder / f"{request['id']}.{'npy' if request['kind'] == 'logprobs' else 'json'}"


def engine_flags(argv: Sequence[str]) -> list[str]:
    """Return the engine's flags out of a server's command line, ``python -m MODULE FLAGS...``."""
    kept, skip = [], 0
    for part in argv[3:]:
        if skip:
            skip -= 1
        elif part in SERVER_FLAGS:
            skip = SERVER_FLAGS[part]
        else:
            kept.append(part)
    return kept


def main(requests_file: Path, folder: Path, argv: Sequence[str]) -> None:
    """Answer the requests that have no answer in ``folder`` yet, with the engine of a server's command line.

    Each request is an object with ``id``, ``kind``, ``tokens``; ``logprobs`` has ``first``, the first position whose
    log-probability is kept, ``generate`` has ``max_tokens``.
    """
    with requests_file.open(encoding="utf-8") as lines:
        open_requests = [request for line in lines if not done(folder, request := json.loads(line))]
    if not open_requests:
        return
    engine = offline(engine_flags(argv))
    confirm(folder)
    for request in open_requests:
        _answer(engine, folder, request)


def offline(flags: Sequence[str]) -> Any:
    """Start the engine in this process, by the flags that ``engine_flags`` returns."""
    arguments = compat.ENGINE_ARGUMENTS.resolve()
    parser = arguments.__self__.add_cli_args(compat.ARGUMENT_PARSER.resolve()())
    return compat.OFFLINE_ENGINE.resolve()(arguments(parser.parse_args(flags)))


def confirm(folder: Path) -> None:
    """Keep what the engine rotates by, before its first answer. Raises: PlatformError, without our plugin."""
    receipts = env.receipts_dir()
    engines = [found for found in receipt.collect(receipts) if found.state == "engine"] if receipts else []
    if not engines:
        raise PlatformError("vLLM runs without the thor_spec plugin, so no answer would be what it seems.")
    whole_file.write(rope_path(folder), json.dumps(engines[0].rope))


def rope_path(folder: Path) -> Path:
    """Return where ``confirm`` writes."""
    return folder / "rope"


def _answer(engine: Any, folder: Path, request: Mapping[str, Any]) -> None:
    params = compat.SAMPLING_PARAMS.resolve()
    prompt = {"prompt_token_ids": request["tokens"]}
    path = answer_path(folder, request)
    if request["kind"] == "logprobs":
        sampling = params(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        sampling.flat_logprobs = True  # a million objects less
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        found = output.prompt_logprobs
        # One entry for each position but the first, which nothing precedes.
        starts = found.start_indices[max(request["first"], 1) :]
        values = np.array([found.logprobs[start] for start in starts], dtype=np.float32)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with draft.open("wb") as file:
            np.save(file, values)
        draft.replace(path)
    else:
        sampling = params(max_tokens=request["max_tokens"], temperature=0, detokenize=False)
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        whole_file.write(path, json.dumps(list(output.outputs[0].token_ids)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
