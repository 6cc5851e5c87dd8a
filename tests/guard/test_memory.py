import pytest

from thor_spec.errors import MemoryNotReturnedError, PlatformError
from thor_spec.guard import memory_return
from thor_spec.guard.memory import GIB, ProcMemory, Reading, default_floor_bytes, parse_full_avg10, parse_meminfo

from .series import FIXTURES, TOTAL_BYTES


@pytest.mark.parametrize(
    ("name", "available_kib"), [("idle", 118_000_000), ("low", 1_500_000), ("pagecache_full", 105_000_000)]
)
def test_available_is_read_and_not_free(name: str, available_kib: int) -> None:
    text = (FIXTURES / f"meminfo_thor_{name}.txt").read_text()
    assert parse_meminfo(text) == (available_kib * 1024, TOTAL_BYTES)


def test_a_truncated_meminfo_is_refused() -> None:
    with pytest.raises(PlatformError, match="no MemAvailable or no MemTotal"):
        parse_meminfo("MemTotal:       128790100 kB\nMemFree:  1 kB\n")


def test_pressure() -> None:
    assert parse_full_avg10((FIXTURES / "proc_pressure_memory_idle.txt").read_text()) == 0.0
    assert parse_full_avg10((FIXTURES / "proc_pressure_memory_stalled.txt").read_text()) == 41.90
    assert parse_full_avg10("some avg10=1.00 avg60=0.00 avg300=0.00 total=0\n") is None
    assert parse_full_avg10("full garbage\n") is None


def test_floor_is_four_gib_or_three_percent() -> None:
    assert default_floor_bytes(TOTAL_BYTES) == 4 * GIB
    assert default_floor_bytes(512 * GIB) == int(512 * GIB * 0.03)


def test_this_machine_is_read_again_and_again() -> None:
    source = ProcMemory()
    first, second = source.read(), source.read()
    assert 0 < first.available_bytes <= first.total_bytes == second.total_bytes
    assert second.at_s > first.at_s


class Clocked:
    """A series with its own time: a value per half second, the last one for ever."""

    def __init__(self, *gib: float) -> None:
        self._values = list(gib)
        self.reads = 0

    def read(self) -> Reading:
        value = self._values[min(self.reads, len(self._values) - 1)]
        self.reads += 1
        return Reading(self.reads * 0.5, int(value * GIB), TOTAL_BYTES, None)


def wait(source: Clocked) -> None:
    memory_return.await_return(source, 100 * GIB, sleep=lambda _: None)


def test_memory_is_back_once_it_is_near_and_flat_for_five_seconds() -> None:
    source = Clocked(40, 60, 80, 97, 97.5, 98.1)
    wait(source)
    assert source.reads == 6 + 11  # at least five flat seconds behind the first 98.1


def test_near_and_still_moving_is_not_back() -> None:
    source = Clocked(*(98 + step % 2 for step in range(40)), 99)
    wait(source)
    assert source.reads > 40


def test_row26_memory_that_does_not_return_is_said_with_the_way_out() -> None:
    source = Clocked(90)
    with pytest.raises(MemoryNotReturnedError, match=r"10\.00 GiB .*within 120 s.*drop_caches.*reboot") as raised:
        wait(source)
    assert raised.value.exit_code == 41
    assert source.reads == 241


def test_row26_memory_that_is_back_and_never_still_is_somebody_elses_doing() -> None:
    source = Clocked(*(98 + step % 2 for step in range(400)))
    with pytest.raises(MemoryNotReturnedError, match="another program takes and returns it"):
        wait(source)
