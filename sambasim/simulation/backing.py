"""What stands behind a prediction, and between which times a step likely lies."""

from sambasim.costs.price import Bound
from sambasim.hardware.calibration import load_calibration
from sambasim.hardware.spec import DeviceSpec
from sambasim.simulation.prediction import Prediction


def backing_of(device: DeviceSpec, replicas: int = 1) -> str:
    """Whether published measurements back the times of `replicas` on devices like `device`; without a full stop."""
    fit = load_calibration().fit
    if device.name == fit.device:
        told = (
            f"calibrated on {fit.rows}, which it meets within {fit.mean_error:.0%} in the mean and"
            f" {fit.worst_error:.0%} at worst; other models may be further off"
        )
    else:
        told = (
            f"no published step of {device.name} backs this: its figures are published or marked as estimates, and"
            f" efficiencies are those of {fit.device}; for HBM, that of the SN40L paper"
        )
    return f"{told}; no sync of RDUs was ever published" if replicas > 1 else told


def likely_s(prediction: Prediction) -> tuple[float, float] | None:
    """Between which times the step lies if it is as far off as the worst calibration row; None for another device, and
    for a step that is bound by launches, as no such row is."""
    fit, step = load_calibration().fit, prediction.alone
    if prediction.device.name != fit.device or step.device_s_by_bound[Bound.LAUNCH] > step.device_s / 2:
        return None
    least = step.device_s * (1 - fit.worst_error) + step.host_s * (1 - fit.worst_host_error)
    most = step.device_s * (1 + fit.worst_error) + step.host_s * (1 + fit.worst_host_error)
    return least, most
