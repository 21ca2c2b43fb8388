"""Token ids from llama.cpp, as a process of its own: `python scripts/tokenizer_peer.py FILE.gguf` (llama-cpp-python).

Reads JSON lines {"text": ..., "special": bool} on stdin and answers each with a JSON list of ids (no bos, no eos);
`special` says whether control tokens in the text are read as such. Exits with 77 when llama_cpp is missing.
"""

import json
import subprocess
import sys


class Peer:
    """The process, from the side of a script that runs in another interpreter. python: one that has llama_cpp."""

    def __init__(self, python: str, gguf_file: str):
        command = [python, __file__, str(gguf_file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        self._process.stdin.write(json.dumps({"text": text, "special": special}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the reference tokenizer ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    try:
        import llama_cpp
    except ImportError:
        print("llama-cpp-python is missing", file=sys.stderr)
        return 77
    model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    for line in sys.stdin:
        request = json.loads(line)
        ids = model.tokenize(request["text"].encode(), add_bos=False, special=request["special"])
        print(json.dumps(ids), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
