"""What ``thor-spec status`` prints. Imports no command line parser, because scripts ask for it in a loop."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thor_spec.guard.status import Status

TABLE_WIDTH = 10


def show_status(*, as_json: bool, last: bool) -> None:
    """Print who holds the device, or with ``last`` how the last job ended."""
    if last:
        _show_last(as_json)
        return
    from thor_spec.guard.status import status as look

    found = look()
    reused = _reuse(found.holder.url) if found.holder and found.holder.url else None
    if as_json:
        print(json.dumps({**found.as_dict(), "prefix_cache": reused}))
        return
    if not found.held:
        print("free")
        return
    _print_rows(_rows(found) | ({"reuse": _reuse_text(reused)} if reused else {}))


def _reuse(url: str) -> dict[str, Any] | None:
    """Return what came from the prefix cache, and why no more; None where no server answers or it caches nothing."""
    from thor_spec.vllm_plugin import reasons

    told = reasons.ask(url)
    if told is None or not told.block:
        return None
    names = ("requests", "tokens", "reused")
    counts = {reason: dict(zip(names, row, strict=True)) for reason, row in told.counts.items() if row[0]}
    return {"block_tokens": told.block, "reused_share": round(told.share, 4), "by_reason": counts}


def _reuse_text(reused: dict[str, Any]) -> str:
    counts = ", ".join(f"{reason} {row['requests']}" for reason, row in reused["by_reason"].items())
    return f"{reused['reused_share']:.0%} of tokens, blocks of {reused['block_tokens']}; requests: {counts or 'none'}"


def _rows(found: "Status") -> dict[str, str]:
    rows: dict[str, str] = {}
    if holder := found.holder:
        rows = {
            "job": holder.title or " ".join(holder.argv),
            "phase": holder.phase,
            "url": holder.url or "-",
            "launcher": f"pid {holder.pid}",
            "since": holder.started_at,
            "uptime": _seconds(found.uptime_s),
            "margin": _margin(found.margin_bytes),
            "last token": "-" if found.last_token_s is None else f"{_seconds(found.last_token_s)} ago",
            "throttled": {True: "yes", False: "no", None: "?"}[found.throttled],
            "log": holder.log_file or "-",
        }
    rows |= {"processes": " ".join(map(str, found.pids)) or "-", "locks": found.lock_dir}
    return rows


def _show_last(as_json: bool) -> None:
    from thor_spec import env
    from thor_spec.guard import processes
    from thor_spec.guard.state import StateStore

    record = StateStore(env.state_dir()).read()
    if as_json:
        print(json.dumps(record.as_dict() if record else None))
        return
    if record is None:
        print("no record")
        return
    code = "?" if record.exit_code is None else str(record.exit_code)
    before = "" if record.boot_id == processes.boot_id() else ", before the last boot"
    rows = {
        "job": record.title or "-",
        "cause": record.cause.replace("\n", " "),
        "exit code": code,
        "ended": f"{record.utc}{before}",
        "phase": record.phase or "-",
        "uptime": _seconds(record.uptime_s),
        "margin": f"{_margin(record.margin_bytes)}; least {_margin(record.least_margin_bytes)}",
    }
    if record.trigger:
        rows["trigger"] = f"{record.trigger.get('kind')}: {record.trigger.get('value')} ({record.trigger.get('limit')})"
    rows |= {"log": record.log_file or "-"} | ({"dump": record.dump} if record.dump else {})
    _print_rows(rows)
    for line in record.notices:
        print(f"{'notice':{TABLE_WIDTH}} {line}")
    for line in record.log_tail:
        print(f"{'':{TABLE_WIDTH}} | {line}")


def _print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        print(f"{name:{TABLE_WIDTH}} {value}")


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} s"


def _margin(value: int | None) -> str:
    return "?" if value is None else f"{value / (1 << 30):.2f} GiB above the floor"
