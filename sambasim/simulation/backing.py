"""What stands behind a prediction, in a sentence that is printed beside it."""

from sambasim.hardware.spec import DeviceSpec

CALIBRATED_ON = "SN30"


def backing_of(device: DeviceSpec, replicas: int = 1) -> str:
    """Whether published measurements back the times of `replicas` on devices like `device`."""
    told = f"efficiencies are calibrated on published {CALIBRATED_ON} steps; sambasim validate tells how far it is off"
    if device.name != CALIBRATED_ON:
        told = f"no published measurement of an {device.name} backs this: efficiencies are those of an {CALIBRATED_ON}"
    return f"{told}; sync is by the bandwidth of links, and no measurement of it is published" if replicas > 1 else told
