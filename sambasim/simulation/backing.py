"""What stands behind a prediction, and between which times a step likely lies."""

from sambasim.costs.price import Bound
from sambasim.hardware.budget import load_calibration
from sambasim.hardware.spec import DeviceSpec, load_device
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.simulation.prediction import Prediction


def backing_of(device: DeviceSpec, replicas: int = 1) -> str:
    """Whether published measurements back the times of `replicas` on devices like `device`; without a full stop."""
    fit = load_calibration().fit
    if device == load_device(fit.arch):
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
    """Between which times the step lies if it is as far off as the worst calibration row; None where it is unlike those
    rows: on another device, without training, bound by launches, or recurrent."""
    fit, step = load_calibration().fit, prediction.alone
    if (
        prediction.device != load_device(fit.arch)
        or prediction.program.training is None
        or step.device_s_by_bound[Bound.LAUNCH] > step.device_s / 2
        or is_recurrent(prediction)
    ):
        return None
    least = step.device_s * (1 - fit.worst_error) + step.host_s * (1 - fit.worst_host_error)
    most = step.device_s * (1 + fit.worst_error) + step.host_s * (1 + fit.worst_host_error)
    return least, most


def is_recurrent(prediction: Prediction) -> bool:
    """Whether a layer's steps wait for each other, which is not modelled."""
    return any(OPERATORS[node.operator].kind is OperatorKind.RECURRENT for node in prediction.graph.nodes)
