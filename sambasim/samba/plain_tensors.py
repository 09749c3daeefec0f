"""SambaFlow's names on every `torch.Tensor`: apps read them from parameters and from results of a host's forward.

    torch(), torch_tensor()   the tensor itself
    sn_grad                   of a parameter of the loaded model: its gradient on the device
    sn_data                   of a parameter or buffer of the loaded model: its value on the device
    sn_name                   None, until something names the tensor

`sn_grad` and `sn_data` of these are read only. Of any other tensor they are what the app assigned; before that,
`sn_grad` is None and `sn_data` the tensor outside autograd. A SambaTensor has its own of these names.
"""

from torch import Tensor

from sambasim.errors import DataError, OptionError
from sambasim.samba.checks.place import app_line

_GRADIENT, _DATA = "_assigned_sn_grad", "_assigned_sn_data"


def install() -> None:
    """Give `torch.Tensor` these names. A second call changes nothing."""
    for name, value in {
        "torch": _itself,
        "torch_tensor": _itself,
        "sn_grad": property(_gradient, _assign_gradient),
        "sn_data": property(_data, _assign_data),
        "sn_name": None,
    }.items():
        setattr(Tensor, name, value)


def _itself(tensor: Tensor) -> Tensor:
    """This tensor, which is a plain one."""
    return tensor


def _gradient(tensor: Tensor) -> Tensor | None:
    """The gradient of this tensor on the device; else what the app assigned, or None."""
    from sambasim.samba.session import session  # which imports SambaTensor

    found = session.device_gradient(tensor)
    return vars(tensor).get(_GRADIENT) if found is None else found


def _assign_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Raises OptionError for a parameter or buffer of the loaded model."""
    _check_not_on_device(tensor, "sn_grad", "set sn_grad on an output: from it, session.run computes the gradients")
    vars(tensor)[_GRADIENT] = gradient


def _data(tensor: Tensor) -> Tensor:
    """This tensor as the device has it; else what the app assigned, or this tensor outside autograd."""
    from sambasim.samba.session import session

    found = session.device_value(tensor)
    if found is not None:
        return found
    assigned: Tensor | None = vars(tensor).get(_DATA)
    return tensor.detach() if assigned is None else assigned


def _assign_data(tensor: Tensor, data: Tensor) -> None:
    """Raises OptionError for a parameter or buffer of the loaded model, DataError for data of another shape."""
    from sambasim.samba.tensor import to_torch

    _check_not_on_device(tensor, "sn_data", "param.data.copy_(…), and then samba.session.to_device(model)")
    plain = to_torch(data)
    if plain.shape != tensor.shape:
        raise DataError(
            f"the tensor has the shape {tuple(tensor.shape)}, and the data the shape {tuple(plain.shape)}",
            where=app_line(),
            remedy="give sn_data the tensor's own shape",
        )
    vars(tensor)[_DATA] = plain


def _check_not_on_device(tensor: Tensor, name: str, remedy: str) -> None:
    from sambasim.samba.session import session

    if session.device_value(tensor) is not None:
        raise OptionError(
            f"{name} of a parameter or buffer of the loaded model is read from the device, and cannot be assigned",
            where=app_line(),
            remedy=remedy,
        )
