"""From the host to the device, without waiting for either."""

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``host`` on ``device``; from pageable memory, the copy would wait for the device."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
