"""Looking after an engine's start and service: reads what the rules need, and raises what they decide."""

import http.client
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

from thor_spec.errors import CanaryError, StalledError, StartDeadlineError
from thor_spec.guard import processes
from thor_spec.serve import failure
from thor_spec.serve.activity import ActivityReader
from thor_spec.serve.background import in_thread
from thor_spec.serve.deadlines import Deadlines
from thor_spec.serve.liveness import Health, Liveness, Scrape, Verdict
from thor_spec.serve.phases import Phase

ACTIVITY_S = 1.0
ENGINE_S = 1.0
SCRAPE_S = 10.0
SCRAPE_TIMEOUT_S = 5.0
CANARY_TIMEOUT_S = 60.0
SAMPLE_TOKENS = 48
_AUTOTUNING = ("autotun", "auto-tun")
_MARLIN = (
    "Autotuning without prebuilt kernels can take hours (vllm#58031): set VLLM_USE_FLASHINFER_MOE_FP4=0, so that NVFP4 "
    "weights run on Marlin, and start again."
)


class StartWatch:
    """One start under its deadlines."""

    def __init__(self, reader: ActivityReader, clock: Callable[[], float], *, cached: bool) -> None:
        self._reader = reader
        self._clock = clock
        self._deadlines = Deadlines(clock(), cached=cached)
        self._look_at = clock()

    def enter(self, phase: Phase) -> None:
        """Take that a phase began."""
        self._deadlines.enter(phase, self._clock())

    def check(self, log_lines: Callable[[], Sequence[str]], log_file: Path) -> bool | None:
        """Look, at most once a second; return whether there was progress, and None without a look.

        Raises: StartDeadlineError, naming the phase and what the log says.
        """
        now = self._clock()
        if now < self._look_at:
            return None
        self._look_at = now + ACTIVITY_S
        if (overrun := self._deadlines.observe(self._reader.read(), now)) is None:
            return self._deadlines.progress_s == now
        lines = log_lines()
        odd = failure.cause(lines, log_file)
        tuning = overrun.phase is Phase.COMPILE or any(word in line.lower() for line in lines for word in _AUTOTUNING)
        advice = f" {_MARLIN}" if tuning else failure.remedy(odd) or " Look for what it waits for there."
        raise StartDeadlineError(f"{overrun.describe()}: {odd}\nSee {log_file}.{advice}")


class ServingWatch:
    """A ready engine under the liveness rules. Requests are made in threads, so that ``check`` never waits."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        engines: Iterable[processes.Process],
        api_key: str | None = None,
        reader: ActivityReader,
        clock: Callable[[], float],
        notice: Callable[[str], None],
        progressed: Callable[[], None],
    ) -> None:
        self.evaluations = 0
        """How often the rules were gone through."""
        self.health = Health.HEALTHY
        self.engine_died: str | None = None
        self._url = url
        self._model = model
        self._api_key = api_key
        self._engines = tuple(engines)
        self._reader = reader
        self._clock = clock
        self._notice = notice
        self._progressed = progressed
        self._liveness = Liveness(clock())
        self._engine_at = self._scrape_at = clock()
        self._scraping: Future[Scrape | None] | None = None
        self._canary: Future[bool] | None = None
        self._sampling: Future[bool] | None = None

    def check(self) -> bool:
        """Do what is due; return whether the rules were gone through. Sets ``engine_died`` by rule 3.

        Raises: StalledError.
        """
        before = self.evaluations
        self._look()
        return self.evaluations > before

    def _look(self) -> None:
        now = self._clock()
        if now >= self._engine_at:
            self._engine_at = now + ENGINE_S
            if dead := self._liveness.engine(any(processes.is_same(engine) for engine in self._engines)):
                self.engine_died = dead.reason
                return
        if self._canary is not None and self._canary.done():
            self._liveness.canary(self._canary.result(), now)
            self._canary = None
        if self._sampling is not None and self._sampling.done():
            if alarm := self._liveness.sample(self._sampling.result()):
                self._notice(alarm)
            self._sampling = None
        if self._scraping is not None and self._scraping.done():
            answer, self._scraping = self._scraping.result(), None
            self._judge(self._liveness.scraped(answer, self._reader.read(), now))
        if self._scraping is None and now >= self._scrape_at:
            self._scrape_at = now + SCRAPE_S
            self._scraping = in_thread(lambda: scrape(self._url), name="scrape")

    def _judge(self, verdict: Verdict) -> None:
        self.evaluations += 1
        if verdict.health is not self.health and verdict.health in (Health.BUSY, Health.HEALTHY):
            if Health.BUSY in (verdict.health, self.health):
                self._notice(verdict.reason or "the API answers again")
            self.health = verdict.health
        for event in verdict.events:
            self._notice(event)
        if verdict.progressed:
            self._progressed()
        if verdict.health is Health.STALLED:
            raise StalledError(f"The engine is alive and makes no progress: {verdict.reason}.")
        if verdict.wants_canary:
            self._canary = in_thread(self._ask_one_token, name="canary")
        if verdict.wants_sample:
            self._sampling = in_thread(self._sample_repeats, name="sample")

    def _ask_one_token(self) -> bool:
        try:
            return len(self._probe(tokens=1)) == 1
        except CanaryError:
            return False

    def _probe(self, *, tokens: int) -> list[int]:
        from thor_spec.serve import canary

        return canary.probe(self._url, self._model, tokens=tokens, timeout_s=CANARY_TIMEOUT_S, api_key=self._api_key)

    def _sample_repeats(self) -> bool:
        from thor_spec.serve import canary

        try:
            tokens = self._probe(tokens=SAMPLE_TOKENS)
        except CanaryError:
            return False
        return canary.repeats(tokens)


def scrape(url: str) -> Scrape | None:
    """Return the metrics, or None when they do not come in time."""
    from thor_spec.serve import metrics

    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return Scrape.of(metrics.totals(text)) if answer.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
