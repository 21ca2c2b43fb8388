"""Where the time of a run goes: recorded at the boundary of the native code, reported as text, JSON, HTML and trace."""

from .recorder import Profiler
from .report import PHASES, profile_report

__all__ = ["PHASES", "Profiler", "profile_report"]
