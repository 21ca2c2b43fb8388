"""Subcommands of `millstream`, one module each. Modules import only click at the top, so that --help stays quick."""
