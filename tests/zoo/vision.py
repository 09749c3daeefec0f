"""Models of torchvision and timm, with random weights and small pictures."""

from tests.zoo.entry import Entry

VISION: tuple[Entry, ...] = ()
