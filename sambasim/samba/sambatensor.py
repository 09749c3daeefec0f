"""SambaTensor, where SambaFlow's apps import it from."""

from sambasim.samba.tensor import SambaTensor, from_torch_tensor, to_torch

__all__ = ["SambaTensor", "from_torch_tensor", "to_torch"]
