"""`habana_frameworks.torch.utils.experimental`: what quantization libraries ask of the card."""

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
    """Kinds of cards. The numbers are not those of the driver."""

    synDeviceGaudi = 0
    synDeviceGaudi2 = 1
    synDeviceGaudi3 = 2


_TYPES = {"GAUDI2": synDeviceType.synDeviceGaudi2, "GAUDI3": synDeviceType.synDeviceGaudi3}


def _get_device_type() -> synDeviceType:
    return _TYPES[active_card().spec.name]


def _is_fp16_supported() -> bool:
    """True of Gaudi 2 and 3, which are all that is simulated."""
    return _get_device_type() in _TYPES.values()


def _data_ptr(t: Tensor) -> int:
    """An address that tells tensors of the card apart; 0 of a tensor elsewhere."""
    return t.raw.data_ptr() if isinstance(t, HpuTensor) else 0


def _set_is_dynamic_quantization(is_dynamic: bool) -> None:
    """A hint to the graph compiler, which the simulation has no use for."""
    active_card()


def _set_scale_attributes(hw_scale: bool, method_index: int) -> None:
    """A hint to the graph compiler, which the simulation has no use for."""
    active_card()
