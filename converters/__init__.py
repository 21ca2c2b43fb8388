"""Converters: other people's checkpoints into snapshots."""
