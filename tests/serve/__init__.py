from pathlib import Path


def fake_engine_path() -> str:
    return str(Path(__file__).with_name("fake_engine.py"))
