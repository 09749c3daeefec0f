"""What stands behind a prediction, in a sentence that is printed beside it."""

from sambasim.hardware.calibration import load_calibration
from sambasim.hardware.spec import DeviceSpec


def backing_of(device: DeviceSpec, replicas: int = 1) -> str:
    """Whether published measurements back the times of `replicas` on devices like `device`."""
    fit = load_calibration().fit
    if device.name == fit.device:
        told = (
            f"calibrated on {fit.rows}, which it meets within {fit.mean_error:.0%} in the mean and"
            f" {fit.worst_error:.0%} at worst; other models may be further off"
        )
    else:
        told = f"no published step of {device.name} backs this: efficiencies are those of {fit.device}"
    return f"{told}; no sync of RDUs was ever published" if replicas > 1 else told
