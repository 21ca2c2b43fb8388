"""Errors a user can cause or meet. Text = what, where, got, expected, what to do; one line."""


class EngineError(Exception):
    """Base of everything millstream raises on purpose; the command line prints it and exits with `exit_code`."""

    exit_code = 2


class ConfigError(EngineError):
    """An option or a config.json key is missing, unknown or out of range."""


class WeightsError(EngineError):
    """A weight file is broken, incomplete or not what its header says."""


class FormatError(EngineError):
    """A storage format is unknown here, or a shape does not fit its blocks."""


class KernelError(EngineError):
    """No kernel for what was asked on this CPU, or a native call refused its arguments."""


class ExpertReadError(EngineError):
    """Expert weights could not be read from disk."""


class NumericsError(EngineError):
    """A value that is not finite appeared during a forward pass."""
