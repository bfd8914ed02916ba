"""Simulates `habana_frameworks.torch.utils.experimental`, which quantization libraries use."""

from enum import Enum

from torch import Tensor

from gaudi_sim.card.device import HpuTensor, active_card

__all__ = [
    "_data_ptr",
    "_get_device_type",
    "_is_fp16_supported",
    "_set_is_dynamic_quantization",
    "_set_scale_attributes",
    "synDeviceType",
]


class synDeviceType(Enum):  # the spelling of the vendor
    """Kinds of cards. The values differ from the driver's."""

    synDeviceGaudi = 0
    synDeviceGaudi2 = 1
    synDeviceGaudi3 = 2


_TYPES = {"GAUDI2": synDeviceType.synDeviceGaudi2, "GAUDI3": synDeviceType.synDeviceGaudi3}


def _get_device_type() -> synDeviceType:
    return _TYPES[active_card().spec.name]


def _is_fp16_supported() -> bool:
    """Return True: Gaudi 2 and 3, which can be simulated, support fp16."""
    return _get_device_type() in _TYPES.values()


def _data_ptr(t: Tensor) -> int:
    """Return a distinct address for each tensor of the card; 0 for other tensors."""
    return t.raw.data_ptr() if isinstance(t, HpuTensor) else 0


def _set_is_dynamic_quantization(is_dynamic: bool) -> None:
    """Ignore a hint to the graph compiler."""
    active_card()


def _set_scale_attributes(hw_scale: bool, method_index: int) -> None:
    """Ignore a hint to the graph compiler."""
    active_card()
