"""SambaFlow's attributes of every torch tensor: `sn_grad`, `sn_data`, `sn_name`, `torch` and `torch_tensor`."""

from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.findings import app_error
from sambasim.samba.session import session
from sambasim.samba.tensor import of_shape

_GRADIENT, _DATA = "_assigned_sn_grad", "_assigned_sn_data"


def install_attributes() -> None:
    """Gives `torch.Tensor`, and so parameters, SambaFlow's attributes. `sn_grad` and `sn_data` of a tensor of the
    loaded model are on the device; of another tensor, what the app assigned."""
    for name, value in {
        "torch": lambda tensor: tensor,
        "torch_tensor": lambda tensor: tensor,
        "sn_grad": property(_gradient, _assign_gradient),
        "sn_data": property(_data, _assign_data),
        "sn_name": None,
    }.items():
        setattr(Tensor, name, value)


def _gradient(tensor: Tensor) -> Tensor | None:
    """The gradient on the device; else what the app assigned, or None."""
    on_device = session.device_gradient(tensor)
    return vars(tensor).get(_GRADIENT) if on_device is None else on_device


def _assign_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Raises OptionError for a parameter or buffer of the loaded model."""
    _check_not_on_device(tensor, "sn_grad", "set sn_grad on an output: from it, session.run computes the gradients")
    vars(tensor)[_GRADIENT] = gradient


def _data(tensor: Tensor) -> Tensor:
    """The value on the device; else what the app assigned, or the detached tensor."""
    on_device = session.device_value(tensor)
    if on_device is not None:
        return on_device
    assigned: Tensor | None = vars(tensor).get(_DATA)
    return tensor.detach() if assigned is None else assigned


def _assign_data(tensor: Tensor, data: Tensor) -> None:
    """Raises OptionError for a parameter or buffer of the loaded model, DataError for data of another shape."""
    _check_not_on_device(tensor, "sn_data", "param.data.copy_(…), and then samba.session.to_device(model)")
    vars(tensor)[_DATA] = of_shape(tensor, data)


def _check_not_on_device(tensor: Tensor, name: str, remedy: str) -> None:
    if session.device_value(tensor) is not None:
        what = f"{name} of a parameter or buffer of the loaded model is on the device, and cannot be assigned"
        raise app_error(OptionError, what, remedy)
