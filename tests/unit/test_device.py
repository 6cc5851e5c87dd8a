"""The board's detection and sensors, and every parser on every fixture."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thor_tree import FIXTURES, fixture, make_thor
from thor_spec.device import board, l4t, memory, nvml, power, sensors, smi, tegrastats, torch_build
from thor_spec.device.board import Kind
from thor_spec.device.commands import Captured, Live
from thor_spec.device.cuda import Gpu
from thor_spec.guard.memory import parse_full_avg10

GIB = 1 << 30


def gpu(name: str, major: int, minor: int) -> Gpu:
    return Gpu(name=name, capability=(major, minor), count=1)


def test_thor_is_known_by_its_files(tmp_path: Path) -> None:
    found = board.detect(make_thor(tmp_path), None)
    assert (found.kind, found.is_jetson) == (Kind.THOR, True)
    assert found.model == "NVIDIA Jetson AGX Thor Developer Kit"
    assert str(found.release) == "38.4.0"
    assert found.evidence == ("/sys/class/devfreq/gpu-gpc-0", "nvidia,tegra264")


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (gpu("NVIDIA Thor", 11, 0), Kind.THOR),
        (gpu("Orin", 8, 7), Kind.ORIN),
        (gpu("NVIDIA GB10", 12, 1), Kind.GB10),
        (gpu("NVIDIA H200", 9, 0), Kind.CUDA),
        (None, Kind.NONE),
    ],
)
def test_kinds_by_gpu_alone(tmp_path: Path, device: Gpu | None, kind: Kind) -> None:
    found = board.detect(tmp_path, device)
    assert found.kind is kind
    assert found.is_unified is (kind in (Kind.THOR, Kind.ORIN, Kind.GB10))


def test_the_release_makes_no_thor(tmp_path: Path) -> None:
    """L4T 39.2 runs on Orin as well."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(fixture("nv_tegra_release_r39_2_0.txt"))
    assert board.detect(tmp_path, None).kind is Kind.NONE
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_bytes(b"nvidia,p3767-0000\0nvidia,tegra234\0")
    assert board.detect(tmp_path, None).kind is Kind.ORIN


@pytest.mark.parametrize("name", ["r38_2_0", "r38_4_0", "r39_2_0"])
def test_releases(name: str) -> None:
    found = l4t.parse_release(fixture(f"nv_tegra_release_{name}.txt"))
    assert str(found) == name.removeprefix("r").replace("_", ".")


def test_jetson_release() -> None:
    found = l4t.parse_jetson_release(fixture("jetson_release_v_thor.txt"))
    assert found == ("NVIDIA Jetson AGX Thor Developer Kit", l4t.Release(38, "4.0"))


def test_sensors_of_the_tree(tmp_path: Path) -> None:
    found = sensors.read(make_thor(tmp_path))
    assert found.celsius == {"cpu": 53.7, "soc012": 55.1, "soc345": 53.7, "tj": 55.1}  # the GPU's zone is gated
    assert found.critical_celsius == 114.5
    assert found.milliwatts == {"VDD_GPU": 7705, "VDD_CPU_SOC_MSS": 11558, "VIN_SYS_5V0": 8853}
    assert found.total_milliwatts == 150_000
    assert found.gpu is not None
    assert (found.gpu.now, found.gpu.highest, found.gpu.pinned) == (1_575_000_000, 1_575_000_000, False)
    assert found.memory is not None
    assert (found.memory.now, found.memory.pinned) == (4_266_000_000, None)
    assert found.throttled == {"cpu": False, "gpu": True, "soc012": False, "soc345": False}
    assert found.gpu_cooling == (18, 169)
    assert found.gpu_throttled is True
    assert found.over_current_events == 821
    assert found.fan_rpm == 1786
    assert found.fan_share == pytest.approx(58 / 255)


def test_sums_of_the_power_chip_are_no_rails(tmp_path: Path) -> None:
    root = make_thor(tmp_path)
    before = sensors.read(root).milliwatts
    (root / "sys/class/hwmon/hwmon3/curr7_input").write_text("5000\n")
    assert sensors.read(root).milliwatts == before


def test_absent_is_none(tmp_path: Path) -> None:
    assert sensors.read(tmp_path) == sensors.Sensors()
    assert sensors.read(tmp_path).gpu_throttled is None


@pytest.mark.parametrize("error", [OSError(11, "Resource temporarily unavailable"), TypeError("NoneType")])
def test_a_gated_zone_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    root = make_thor(tmp_path)
    (root / "sys/class/thermal/thermal_zone1/temp").write_text("1\n")
    read_text = Path.read_text

    def gated(path: Path, *args: object, **options: object) -> str:
        if path.parent.name == "thermal_zone1" and path.name == "temp":
            raise error
        return read_text(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", gated)
    assert "gpu" not in sensors.read(root).celsius


def test_the_system_after_a_clock_was_gated(tmp_path: Path) -> None:
    root = make_thor(tmp_path)
    (root / "sys/class/devfreq/gpu-gpc-0/cur_freq").write_text("0\n")
    found = sensors.read(root).gpu
    assert found is not None
    assert found.now == 0  # gated, which is a value


@pytest.mark.parametrize(
    ("name", "available_gib", "reclaimable_gib"),
    [("idle", 112.5, 5.7), ("pagecache_full", 100.1, 70.1), ("low", 1.4, 0.8)],
)
def test_memory(name: str, available_gib: float, reclaimable_gib: float) -> None:
    found = memory.parse(fixture(f"meminfo_thor_{name}.txt"))
    assert found.total == 128_790_100 * 1024
    assert found.available is not None
    assert found.reclaimable is not None
    assert found.available / GIB == pytest.approx(available_gib, abs=0.1)
    assert found.reclaimable / GIB == pytest.approx(reclaimable_gib, abs=0.1)
    assert memory.parse("MemTotal: lots kB\n") == memory.Memory()


def test_pressure() -> None:
    assert parse_full_avg10(fixture("proc_pressure_memory_idle.txt")) == 0.0
    assert parse_full_avg10(fixture("proc_pressure_memory_stalled.txt")) == 41.9


def test_power_modes() -> None:
    assert power.parse_mode(fixture("nvpmodel_q_120W.txt")) == ("120W", 1)
    assert power.parse_mode(fixture("nvpmodel_q_MAXN.txt")) == ("MAXN", 0)
    assert power.parse_mode(fixture("nvpmodel_m2_reboot_needed.txt")) is None
    assert "reboot" in (power.refusal(fixture("nvpmodel_m2_reboot_needed.txt")) or "")
    assert "root" in (power.refusal(fixture("jetson_clocks_show_nonroot.txt")) or "")
    assert power.refusal(fixture("jetson_clocks_set.txt")) is None


def test_the_table_of_power_modes_is_the_study_s() -> None:
    rows = csv.DictReader(io.StringIO(fixture("nvpmodel_modes_thor.csv")))
    assert {
        int(row["id"]): power.Mode(
            row["name"], int(row["gpu_mhz"]), int(row["cpu_mhz"]), row["reboot_needed_to_enter"] == "yes"
        )
        for row in rows
    } == power.THOR_MODES


def lines(name: str) -> list[tegrastats.TegraStats]:
    return [tegrastats.parse(line) for line in fixture(name).splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "count"), [("idle_nosudo", 5), ("cuda_load", 4)])
def test_tegrastats_of_a_user(name: str, count: int) -> None:
    found = lines(f"tegrastats_thor_r38_4_{name}.txt")
    assert len(found) == count
    for line in found:
        assert line.ram_total_bytes == 125_772 << 20
        assert len(line.cpu_percent) == 14
        assert set(line.celsius) == {"cpu", "tj", "soc012", "gpu", "soc345"}
        assert set(line.milliwatts) == {"VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0", "VIN"}
        assert (line.emc_percent, line.emc_mhz, line.gpu_percent, line.gpu_mhz) == (None,) * 4
    assert found[0].celsius["tj"] == {"idle_nosudo": 36.843, "cuda_load": 37.343}[name]


def test_tegrastats_of_root() -> None:
    (found,) = lines("tegrastats_thor_r38_4_root_idle.txt")
    assert (found.emc_percent, found.emc_mhz) == (0, 2750)
    assert (found.gpu_percent, found.gpu_mhz) == (None, 314)
    assert found.milliwatts["VIN"] == 19780


def test_tegrastats_of_release_39() -> None:
    loaded, idle = lines("tegrastats_thor_r39_loaded.txt")
    assert (loaded.gpu_percent, loaded.gpu_mhz, loaded.emc_percent, loaded.emc_mhz) == (87, 1574, 34, 4266)
    assert loaded.celsius["tj"] == 66.625
    assert loaded.milliwatts["VIN"] == 124_486
    assert loaded.cpu_percent == (90, 75, None, 7)
    assert (idle.gpu_percent, idle.emc_percent, idle.emc_mhz) == (None, None, 4266)
    assert idle.cpu_percent[:2] == (0, 5)


def test_tegrastats_with_the_gpu_gated() -> None:
    (found,) = lines("tegrastats_thor_gpu_gated.txt")
    assert "gpu" not in found.celsius
    assert found.milliwatts["VDD_GPU"] == 0


def test_tegrastats_with_power_below_zero() -> None:
    (found,) = lines("tegrastats_thor_negative_power.txt")
    assert found.milliwatts["VDD_GPU"] == -392
    assert found.celsius == {}


def test_tegrastats_of_an_orin() -> None:
    found = lines("tegrastats_orin_nx_idle.txt")
    assert [line.milliwatts["VDD_IN"] for line in found] == [5969, 5577, 5483]
    assert found[0].gpu_percent == 0
    assert found[0].gpu_mhz is None
    assert "VIN" not in found[0].milliwatts


def test_nvidia_smi() -> None:
    old = smi.parse_table(fixture("nvidia_smi_thor_jp70.txt"))
    assert (old.driver, old.cuda, old.name) == ("580.00", (13, 0), "NVIDIA Thor")
    assert (old.celsius, old.watts, old.percent) == (None, None, 0)
    new = smi.parse_table(fixture("nvidia_smi_thor_jp72.txt"))
    assert (new.driver, new.cuda, new.celsius, new.watts, new.percent) == ("595.78", (13, 2), 35, 1, 0)


def test_nvidia_smi_query_of_a_gb10() -> None:
    (row,) = smi.parse_query(fixture("nvidia_smi_query_gb10.csv"))
    assert row["memory.total"] is None
    assert (row["power.draw"], row["utilization.gpu"], row["temperature.gpu"]) == (11.17, 0.0, 35.0)


def test_nvidia_smi_soc() -> None:
    found = smi.parse_soc(fixture("nvidia_smi_soc_q.txt"))
    assert found.celsius == {"cpu": 59.22, "tj": 60.41, "soc012": 58.47, "soc345": 60.41}
    assert found.milliwatts == {"VDD_GPU": 5145, "VDD_CPU_SOC_MSS": 5937, "VIN_SYS_5V0": 4939}


def test_torch_build() -> None:
    found = torch_build.parse(fixture("torch_probe_thor.txt"))
    assert (found.version, found.cuda, found.device, found.capability) == (
        "2.13.0+cu130",
        "13.0",
        "NVIDIA Thor",
        (11, 0),
    )
    assert torch_build.covers(found.archs, (11, 0))
    assert torch_build.covers(found.archs, (9, 0))
    assert not torch_build.covers(("sm_80", "sm_100a", "sm_120"), (11, 0))
    assert torch_build.covers(("compute_90",), (11, 0))
    assert torch_build.covers(("sm_80",), (8, 7))


_FAKE = """
class NVMLError_NotSupported(Exception): pass
answers = {answers!r}
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def __getattr__(call):
    def answer(*args):
        if call not in answers: raise NVMLError_NotSupported
        return answers[call]
    return answer
"""


def _probe_with(folder: Path, answers: dict[str, object]) -> nvml.Nvml | None:
    (folder / "pynvml.py").write_text(_FAKE.format(answers=answers))
    done = subprocess.run([sys.executable, "-c", nvml.PROBE], cwd=folder, capture_output=True, text=True, check=True)
    return nvml.parse(done.stdout)


def test_nvml_of_a_thor(tmp_path: Path) -> None:
    """The real probe, over a library that answers what the fixture says, and refuses what it says."""
    answers: dict[str, object] = {}
    for line in fixture("nvml_supported_calls_thor.txt").splitlines():
        call, equals, value = line.partition("=")
        if equals:
            text = value.split("(")[0].strip()
            answers[call.strip()] = int(text) if text.isdigit() else text
    assert answers.pop("nvmlDeviceGetUtilizationRates") == "gpu 0, memory 0"
    found = _probe_with(tmp_path, answers)
    assert found == nvml.Nvml(name="NVIDIA Thor", driver="580.00", milliwatts=1965, celsius=36)


def test_nvml_of_a_gb10(tmp_path: Path) -> None:
    text = fixture("nvml_gb10.txt")
    assert text.count("NVML_ERROR_NOT_SUPPORTED") == 2
    named = dict(line.split(" : ") for line in text.splitlines() if " : " in line)
    found = _probe_with(tmp_path, {"nvmlDeviceGetName": named["device"], "nvmlSystemGetDriverVersion": named["driver"]})
    assert found == nvml.Nvml(name="NVIDIA GB10", driver="580.173.02")
    assert memory.parse(text).total == 127_600_748 * 1024


def test_captured_and_live_answers(tmp_path: Path) -> None:
    (tmp_path / "nvpmodel_q.txt").write_text("NV Power Mode: 120W\n1\n")
    assert Captured(tmp_path).ask(["nvpmodel", "-q"]) == "NV Power Mode: 120W\n1"
    assert Captured(tmp_path).ask(["nvidia-smi"]) is None
    assert Live().ask(["no-such-tool"]) is None
    assert Live().ask(["sh", "-c", "read line || echo closed; echo wrong >&2"]) == "closed\nwrong\n"


def test_every_fixture_is_used() -> None:
    """A file nobody reads proves nothing. The tree of sysfs counts as one."""
    here = "".join(path.read_text() for path in Path(__file__).parents[1].glob("**/*.py"))
    for path in FIXTURES.iterdir():
        if path.name == "SOURCES.md":
            continue
        stem = (
            path.name.removeprefix("nv_tegra_release_").removeprefix("meminfo_thor_").removeprefix("tegrastats_thor_")
        )
        stem = stem.removeprefix("r38_4_").split(".")[0] if path.suffix == ".txt" else path.name
        assert stem in here, path.name
