"""Helpers of the snapshot and converter tests: break files on purpose, run the real command line."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from converters.hf import RoleFormats, convert
from engine.weights.header import HEADER_FILE, header_identity

ROOT = Path(__file__).parent.parent


def run_cli(*args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m engine ARGS`."""
    done = subprocess.run(
        [sys.executable, "-m", "engine", *map(str, args)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def assert_refused_by_cli(args, *words: str) -> None:
    """Exit code 2 and one line on stderr that holds every word; no traceback, nothing on stdout."""
    code, out, err = run_cli(*args)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (code, out, err)
    assert "Traceback" not in err
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0], (word, lines[0])
    assert out == ""


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def edit_header(snapshot: Path, edit, *, sign: bool = False) -> None:
    """Apply edit(content) to millstream.json; sign: recompute the identity, as a careful forger would."""
    path = snapshot / HEADER_FILE
    content = read_json(path)
    edit(content)
    if sign:
        content["identity"] = header_identity(content)
    path.write_text(json.dumps(content))


def tensor(content: dict, name: str) -> dict:
    """The entry of one tensor in a header."""
    return next(entry for entry in content["tensors"] if entry["name"] == name)


def edit_safetensors_header(path: Path, edit) -> None:
    """Apply edit(header) to a safetensors file's JSON header; data bytes stay, in place where there is room."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def write_at(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def truncate(path: Path, missing_bytes: int) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - missing_bytes)


def copy_dir(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def directory_bytes(path: Path) -> dict[str, str]:
    """File name -> digest of its content. Not the content: pytest's diff of megabytes would not end."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def make_snapshot(hf: Path, out: Path, **options):
    """Convert with f32 everywhere unless told otherwise. Options: those of RoleFormats and of convert."""
    roles = ("experts", "gate_up", "down", "dense", "embed", "head")
    formats = {"experts": "f32", "dense": "f32"} | {role: options.pop(role) for role in roles if role in options}
    return convert(hf, out, formats=RoleFormats(**formats), **options)
