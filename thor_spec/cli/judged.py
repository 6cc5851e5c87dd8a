"""What the commands of ``thor-spec verify`` share: the servers to judge, the judging, and how it ends."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thor_spec.cli import starting
from thor_spec.cli.notes import note
from thor_spec.errors import ConfigError, GateError

if TYPE_CHECKING:
    from thor_spec.gates.judging import Planned, Subject
    from thor_spec.gates.verdict import Verdict
    from thor_spec.serve.plan import Plan


class Servers:
    """Which servers to judge, from the options of a command."""

    def __init__(
        self,
        flags: dict[str, Any],
        profile: Path | None,
        rest: Sequence[str],
        *,
        url: str | None,
        reference_url: str | None = None,
        stock: bool = False,
    ) -> None:
        self.flags = flags
        self.profile = profile
        self.rest = tuple(rest)
        self.url = url
        self.reference_url = reference_url
        self.stock = stock
        given = [name for name in ("model", "draft", "draft_tokens", "kv_cache_memory") if flags[name] is not None]
        starting.require_none_to_start(url, given or (["-- or --stock"] if rest or stock else []))
        if reference_url and not url:
            raise ConfigError("--reference-url goes with --url; without it both servers are started here.")

    def subject(self) -> "Subject":
        """Return candidate and references."""
        from thor_spec.gates.judging import Running, Subject

        if self.url:
            references = {"plain": Running(self.reference_url)} if self.reference_url else {}
            return Subject(candidate=Running(self.url), references=references)
        servers = {"plain": self.planned({"draft": "none", "draft_tokens": None})}
        if self.stock:
            servers["stock"] = self.planned({}, stock=True)
        return Subject(candidate=self.planned({"allow_controls": True}), references=servers)

    def asked(self, more: dict[str, Any]) -> dict[str, Any]:
        """Return what a record says was asked: of which servers, and ``more``."""
        return {**self.flags, **more, "url": self.url, "vllm_args": list(self.rest)}

    def left_out(self) -> dict[str, str]:
        """Return the gates that cannot be asked, and why."""
        from thor_spec.gates.prefix_cache import caches
        from thor_spec.serve.client import Server

        if self.url:
            with Server(self.url) as server:
                cached = {"controls": "the server caches prefixes"}
                one = cached if caches(server) else {"prefix-cache": "the server does not cache prefixes"}
            return one | {"tree": "a running server cannot be looked into"}
        plan = self.planned({}).plan
        if plan.drafter is None or not plan.target.is_hybrid:
            return {"tree": "it takes a hybrid with a drafter"}
        return {}

    def caching(self, *, alone: bool) -> "Subject":
        """Return a candidate that caches prefixes; unless ``alone``, one with odd chunks and one with a small cache."""
        from thor_spec.gates.judging import Derived, Running, Subject
        from thor_spec.gates.prefix_cache import ODD, SMALL, odd_chunks, small_cache

        if self.url:
            return Subject(candidate=Running(self.url), references={})

        def caching(more: tuple[str, ...] = ()) -> "Planned":
            return self.planned({"allow_controls": True}, more=("--enable-prefix-caching", *more))

        references = {
            ODD: Derived(lambda told: caching(odd_chunks(told))),
            SMALL: Derived(lambda told: caching(small_cache(told))),
        }
        return Subject(candidate=caching(), references={} if alone else references)

    def planned(self, changes: dict[str, Any], *, stock: bool = False, more: tuple[str, ...] = ()) -> "Planned":
        """Return one engine to start: the same but for ``changes``, and with ``more`` arguments for vLLM."""
        from thor_spec.serve.passthrough import mentions

        # Ties are recognized by the spread of all logits; and states are kept in the same mode on both sides.
        own = more if mentions(self.rest, "--max-logprobs") else (*more, "--max-logprobs", "-1")
        told = mentions((*self.rest, *own), "--enable-prefix-caching")
        own = own if told else (*own, "--no-enable-prefix-caching")
        return starting.planned({**self.flags, **changes, "vllm_args": self.rest}, self.profile, stock=stock, own=own)


def judge(names: tuple[str, ...], servers: Servers, asked: dict[str, Any]) -> "list[Verdict]":
    """Run gates by name. Raises: ConfigError, for a corruption unknown to them; what starting an engine raises."""
    from thor_spec.config import CACHED_CONTROLS
    from thor_spec.gates import judging
    from thor_spec.gates.controls import KINDS
    from thor_spec.gates.gate import Options
    from thor_spec.gates.registry import named

    kinds = tuple(CACHED_CONTROLS) if names == ("prefix-cache",) else KINDS
    if (control := asked.get("control")) and control not in kinds:
        raise ConfigError(f"--control {control} is not one of {', '.join(kinds)}.")
    options = Options(say=note, **asked)
    gates = named(names)
    verdicts = []
    if plain := [gate for gate in gates if not gate.wants_caching]:
        verdicts += judging.judge(plain, servers.subject(), options)
    if caching := [gate for gate in gates if gate.wants_caching]:
        verdicts += judging.judge(caching, servers.caching(alone=bool(control)), options)
        if not servers.url and not control:
            _remember(servers.planned({}).plan, passed=verdicts[-1].passed)
    return verdicts


def trees(wanted: dict[str, Any], profile: Path | None, *, rows: int, plant: bool = False, seed: int = 0) -> "Verdict":
    """Judge the branch-state invariants in an engine of its own, started as ``wanted``."""
    from thor_spec.gates import tree
    from thor_spec.serve import log

    plan = starting.planned(wanted, profile).plan
    given = tree.job(plan, rows=wanted["max_seqs"], verified_rows=rows, faults=plant, seed=seed)
    return tree.verdict(tree.run(plan, given, log=log.open_path(None, kind="verify-tree"), say=note))


def conclude(name: str, verdicts: "list[Verdict]", options: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Write the record, print the table or JSON, and exit. Raises: GateError, where a gate is red."""
    from thor_spec import record

    passed = all(verdict.passed for verdict in verdicts)
    result = {"options": options, "verdicts": [verdict.as_dict() for verdict in verdicts], "passed": passed}
    path = record.write(f"verify-{name}", result, folder=out)
    print(json.dumps({**result, "record": str(path)}) if as_json else _table(verdicts, path))
    _exit(verdicts)


def _remember(plan: "Plan", *, passed: bool) -> None:
    """Let later starts know what the gate over the cache said."""
    from thor_spec import provenance
    from thor_spec.serve import prefix_caching

    if plan.drafter is not None:
        utc = provenance.collect().utc
        config = plan.resolved.config
        prefix_caching.remember(config, plan.target, plan.drafter, plan.draft_tokens, passed=passed, utc=utc)


def _table(verdicts: "Sequence[Verdict]", path: Path) -> str:
    return "\n".join([*(verdict.as_text() for verdict in verdicts), f"record {path}"])


def _exit(verdicts: "Sequence[Verdict]") -> None:
    if red := [verdict.gate for verdict in verdicts if not verdict.passed]:
        raise GateError(f"{', '.join(red)} is red: these answers are not those of the model alone. See the record.")
