from pathlib import Path

from thor_spec.guard import sensors


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_absent_is_none_and_never_zero(tmp_path: Path) -> None:
    assert sensors.read(tmp_path) == (None, None, None)


def test_zones_and_devices_are_found_by_type(tmp_path: Path) -> None:
    thermal = "class/thermal"
    root = make(
        tmp_path,
        {
            f"{thermal}/thermal_zone1/type": "gpu-thermal\n",  # gated: it has no readable temperature
            f"{thermal}/thermal_zone4/type": "tj-thermal\n",
            f"{thermal}/thermal_zone4/temp": "55100\n",
            f"{thermal}/cooling_device9/type": "gpu-throttle-alert\n",
            f"{thermal}/cooling_device9/cur_state": "1\n",
            f"{thermal}/cooling_device12/type": "devfreq-gpu-gpc-0\n",
            f"{thermal}/cooling_device12/cur_state": "0\n",
            f"{thermal}/cooling_device12/max_state": "18\n",
            "soctherm_oc/oc1_event_cnt": "0\n",
            "soctherm_oc/oc2_event_cnt": "8\n",
            "soctherm_oc/oc3_event_cnt": "813\n",
        },
    )
    assert sensors.read(root) == (55100, True, 821)
    (root / f"{thermal}/cooling_device9/cur_state").write_text("garbage\n")
    assert sensors.read(root).throttled is False
    (root / f"{thermal}/cooling_device12/cur_state").write_text("3\n")  # its clock is limited: `top` says so, too
    assert sensors.read(root).throttled is True
    (root / f"{thermal}/cooling_device12/cur_state").unlink()
    assert sensors.read(root).throttled is None
