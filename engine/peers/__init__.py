"""Other engines on the same files, each in a process of its own; only for comparisons."""
