"""The arm of `millstream bench --against llama.cpp`: a worker process that holds the same GGUF file."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ..errors import ConfigError

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
_PROBE = "import llama_cpp, numpy"


class LlamaCppArm:
    """llama.cpp on a GGUF file. python: an interpreter that has llama-cpp-python, None for this one.

    Raises ConfigError when it has not, or the file cannot be loaded there. note: what a reader of the figures must
    know, or None.
    """

    def __init__(self, name: str, model, threads: int, positions: int, python: str | None = None):
        self.name, self.note = name, None
        self._python = python or sys.executable
        self._probe(python)
        options = {"path": str(model), "threads": threads, "positions": positions}
        try:
            self._start({**options, "repack": True})
        except ConfigError as error:
            self._start({**options, "repack": False})
            self.note = f"note: {error}; it runs without re-packed weights (slower prefill)"
        self._options = options

    def _probe(self, python: str | None) -> None:
        try:
            done = subprocess.run([self._python, "-c", _PROBE], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"--peer-python {python}: cannot be started: {error.strerror}") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it failed"])[-1]
            where = f"--peer-python {python}: {reason}" if python else f"--against llama.cpp: {reason}"
            raise ConfigError(
                f"{where}; it needs llama-cpp-python: pip install 'millstream[peers]', or name a Python that has it "
                "with --peer-python"
            )

    def _start(self, options: dict) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  llama.cpp writes a lot
        command = [self._python, str(WORKER), json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._facts = self._reply() | {"threads": options["threads"], "repacked": options["repack"]}
        self.vocab_size = self._facts.pop("vocab_size")

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        last = [line for line in lines if "error" in line.lower()][:1] or (lines[-1:] if status >= 0 else [])
        how = f"crashed with signal {-status}" if status < 0 else f"ended with status {status}"
        raise ConfigError(f"llama.cpp {how}" + (f" ({last[0]})" if last else ""))

    def _ask(self, ids, tokens: int) -> dict:
        print(json.dumps({"prompt": [int(t) for t in ids], "tokens": tokens}), file=self._process.stdin, flush=True)
        return self._reply()

    def describe(self) -> dict:
        return self._facts

    def prefill(self, ids: np.ndarray) -> float:
        """Seconds for a prefill of ids [T] into an empty cache."""
        return self._ask(ids, 0)["prefill_s"]

    def decode(self, ids: np.ndarray, tokens: int) -> tuple[float, list[int]]:
        """Seconds for `tokens` greedy tokens behind ids, and one token more."""
        reply = self._ask(ids, tokens)
        return reply["decode_s"], reply["ids"]

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
