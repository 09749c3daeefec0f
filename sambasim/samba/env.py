"""What an app asks about where it runs."""

__all__ = ["use_mock_samba_runtime"]


def use_mock_samba_runtime() -> bool:
    """Whether the runtime is one that computes nothing: False. There is no RDU here, but every number is computed, so
    an app that leaves out its checks of results under a mock runtime makes them here."""
    return False
