"""The gate of draft trees: the six branch-state invariants, looked at inside an engine of its own.

Other gates ask a server; what a tree does to states, windows and caches between two tokens can only be seen within.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.errors import ConfigError, EngineStartError
from thor_spec.gates import prompts
from thor_spec.gates.gate import Paced
from thor_spec.gates.verdict import Verdict
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.serve import failure
from thor_spec.serve.log import Tail
from thor_spec.serve.plan import Plan
from thor_spec.vllm_plugin.options import NAME

INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6")
FAULTS = {
    "siblings share a row": "I1",
    "the root's update is lost": "I2",
    "the convolution takes nodes in a line": "I2",
    "positions are one too far": "I2",
    "verification writes the state": "I3",
    "branches see each other": "I4",
    "one layer is committed": "I5",
    "the first nodes are committed": "I5",
    "keys and values stay where they are": "I5",
    "padding is accepted": "I5",
    "a failed commit is swallowed": "I5",
    "the drafter is fed in a line": "I5",
    "a chain comes out otherwise": "I6",
}
"""What is planted, and which invariant must see it. ``vllm_plugin.tree.faults`` knows how."""
POLL_S = 0.5
MODULE = "thor_spec.vllm_plugin.tree.check"


def job(plan: Plan, *, rows: int, verified_rows: int, faults: bool, seed: int) -> dict[str, Any]:
    """Return what the engine is asked to do. Raises: ConfigError, where the plan drafts no trees on a hybrid."""
    if not plan.tree or plan.drafter is None:
        raise ConfigError("verify tree needs --tree and a drafter: without branches there is nothing to look at.")
    if not plan.target.is_hybrid:
        raise ConfigError("verify tree is about recurrent states, and this target has none. Ask verify lossless.")
    additional = json.loads(plan.argv[plan.argv.index("--additional-config") + 1])
    options = additional.pop(NAME)
    return {
        "target": str(plan.target.path),
        "drafter": str(plan.drafter.path),
        "nodes": plan.draft_tokens,
        "context": min(plan.context, 512),
        "rows": rows,
        "kv_cache_bytes": plan.resolved.config.kv_cache_memory or 1 << 30,
        "options": options,
        "additional": additional,
        "verified_rows": verified_rows,
        "faulty_rows": 60,
        "faults": list(FAULTS) if faults else [],
        "prompts": list(prompts.read()),
        "seed": seed,
    }


def run(plan: Plan, given: Mapping[str, Any], *, log: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the job under the guard. Raises: EngineStartError, if the engine dies; what the guard raises.

    Args:
        log: where its output goes, behind that of earlier runs.
        say: told how far it has come, a line at a time.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer, progress = (Path(folder) / name for name in ("job.json", "result.json", "progress"))
        asked.write_text(json.dumps(given))
        changes = {**plan.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # it must be looked at from within
        with (
            Tail(log) as tail,
            GuardedJob.start(
                [sys.executable, "-m", MODULE, str(asked), str(answer), str(progress)],
                env=env.child_environment(changes),
                output=log,
                title="verify tree",
                settings=Settings(floor_bytes=plan.resolved.config.memory_floor),
                notice=lambda _: None,
            ) as guarded,
        ):
            told, tell = "", Paced(say, at_once=True)
            while (code := guarded.job.wait(POLL_S)) is None:
                guarded.check()
                known = progress.read_text() if progress.is_file() else told
                if known != told and tell(f"verify tree: {known}"):
                    told = known
            guarded.check()
            guarded.cause = f"the engine ended with status {code}"
            if code != 0 or not answer.is_file():  # within, so that what the guard may find later tells it, too
                why = failure.told(failure.cause(tail.all_lines(), log), log)
                raise EngineStartError(f"The engine of verify tree ended with status {code}: {why}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Conclude: no violation, everything looked at, and every planted fault seen by its invariant."""
    clean = found[""]
    checked, violated, rows = clean["checked"], clean["violated"], clean["rows"]
    findings = list(clean["told"])
    missing = [name for name in INVARIANTS if not checked.get(name)]
    findings += [f"{name} was never looked at" for name in missing]
    if not rows.get("tree") or not rows.get("accepted"):
        findings.append(f"no tree branched, or none was accepted: {rows}. Nothing was tested.")
    unseen = [fault for fault, name in FAULTS.items() if fault in found and not found[fault]["violated"].get(name)]
    findings += [f"planted, and not seen by {FAULTS[fault]}: {fault}" for fault in unseen]
    counted = ", ".join(f"{name} {violated.get(name, 0)}/{checked.get(name, 0)}" for name in INVARIANTS)
    planted = len(found) - 1
    seen = f"; {planted - len(unseen)} of {planted} planted faults seen" if planted else ""
    summary = (
        f"violations of what was looked at: {counted}; {rows.get('tree', 0)} trees and {rows.get('chain', 0)} chains "
        f"over {clean['layers']} layers{seen}"
    )
    passed = not sum(violated.values()) and not findings
    return Verdict(gate="tree", passed=passed, summary=summary, figures=dict(found), findings=tuple(findings))
