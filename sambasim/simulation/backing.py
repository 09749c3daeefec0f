"""What stands behind a prediction, in a sentence that is printed beside it."""

from sambasim.hardware.spec import DeviceSpec

CALIBRATED_ON = "SN30"


def backing_of(device: DeviceSpec) -> str:
    """Whether a published measurement of `device` backs its times."""
    if device.name != CALIBRATED_ON:
        return f"no published measurement of an {device.name} backs this: efficiencies are those of an {CALIBRATED_ON}"
    return f"efficiencies are calibrated on published {CALIBRATED_ON} steps; sambasim validate tells how far it is off"
