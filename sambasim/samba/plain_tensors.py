"""SambaFlow's names on every `torch.Tensor`: apps read them from parameters and from results of a host's forward.

    torch(), torch_tensor()   the tensor itself
    sn_grad                   the gradient at a parameter on the device; else what the app assigned, or None
    sn_data                   a parameter or buffer on the device; else what the app assigned, or the tensor itself
    sn_name                   None, until something names the tensor

The device has only the tensors of the model that the session has loaded. A SambaTensor has its own of these.
"""

from torch import Tensor

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
    """The gradient at this tensor on the device; else what the app assigned, or None."""
    from sambasim.samba.session import session  # which imports SambaTensor

    found = session.device_gradient(tensor)
    return vars(tensor).get(_GRADIENT) if found is None else found


def _assign_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
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
    vars(tensor)[_DATA] = data
