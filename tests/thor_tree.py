"""A Thor's files below a folder, put together from the fixtures, with its tools' answers beside them."""

import shutil
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "thor"


def fixture(name: str) -> str:
    """Return a fixture's text."""
    return (FIXTURES / name).read_text()


def make_thor(root: Path, *, release: str = "r38_4_0", memory: str = "idle") -> Path:
    """Fill ``root``; answers of commands go to ``root/captured``."""
    shutil.copytree(FIXTURES / "sysfs_thor", root, dirs_exist_ok=True)
    (root / "sys/class/thermal/thermal_zone1/README").unlink()
    for folder in ("proc/device-tree", "proc/pressure", "etc", "captured"):
        (root / folder).mkdir(parents=True)
    for source, target in {
        "proc_device_tree_model.bin": "proc/device-tree/model",
        "proc_device_tree_compatible.bin": "proc/device-tree/compatible",
        f"nv_tegra_release_{release}.txt": "etc/nv_tegra_release",
        f"meminfo_thor_{memory}.txt": "proc/meminfo",
        "proc_pressure_memory_idle.txt": "proc/pressure/memory",
        "nvpmodel_q_120W.txt": "captured/nvpmodel_q.txt",
        "nvidia_smi_thor_jp70.txt": "captured/nvidia_smi.txt",
        "torch_probe_thor.txt": "captured/torch.txt",
    }.items():
        shutil.copy(FIXTURES / source, root / target)
    return root
