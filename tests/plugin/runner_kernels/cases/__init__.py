"""Launches to compare, a module of them for each of ``runner_kernels``; importing them fills ``CASES``."""

import importlib
import pkgutil

from tests.plugin.runner_kernels.launch import CASES

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["CASES"]
