"""Kimi K2: DeepSeek-V3's architecture under a name of its own."""

from .deepseek_v3 import *  # noqa: F403
