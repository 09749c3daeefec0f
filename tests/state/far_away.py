"""A module with state, as people have beside their models."""

MODULE_CALLS = 0


def count() -> int:
    global MODULE_CALLS
    MODULE_CALLS += 1
    return MODULE_CALLS - 1


class Keeper:
    _one: "Keeper | None" = None

    def __init__(self) -> None:
        self.n = 0

    @classmethod
    def get(cls) -> "Keeper":
        cls._one = cls._one or cls()
        return cls._one

    def count(self) -> int:
        self.n += 1
        return self.n - 1
