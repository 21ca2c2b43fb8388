"""ggml's vec_dot functions as a peer for timings: one row, one token, ggml's own activation blocks.

`llama-cpp-python` (extra `peers`) brings libggml-cpu, but pip builds it for the machine at hand, with AVX-512 where the
CPU has it. For a comparison on AVX2 the two files that hold the dot products are compiled again, with AVX2 flags only,
from the source distribution of the installed version, and linked to the installed library for their tables.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-msse4.2", "-mno-avx512f"]
PARTS = ("ggml/include/", "ggml/src/")
SOURCES = ("ggml/src/ggml-cpu/arch/x86/quants.c", "ggml/src/ggml-cpu/quants.c")
# Activation partner -> (bytes of a block, its length, where the int8 start, dtype of the scale in front)
PARTNERS = {
    "q8_0": (34, 32, 2, np.float16),
    "q8_1": (36, 32, 4, np.float16),
    "q8_K": (292, 256, 4, np.float32),
}
_Q8_0 = ("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4", "nvfp4")
_Q8_1 = ("q4_1", "q5_1")
_Q8_K = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
_Q8_K += ("iq4_xs", "tq1_0", "tq2_0")
PARTNER = dict.fromkeys(_Q8_0, "q8_0") | dict.fromkeys(_Q8_1, "q8_1") | dict.fromkeys(_Q8_K, "q8_K")

LOOPS = """#include <stddef.h>
#include <immintrin.h>
/* ggml computes one row for one token per call; in Python the loop over rows would be timed. */
void rows(void (*dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int), int num_rows, int cols,
          const char *w, size_t row_bytes, const void *x, float *y) {
    for (int r = 0; r < num_rows; r++) dot(cols, y + r, 0, w + (size_t)r * row_bytes, 0, x, 0, 1);
}
/* Reads everything once, prefetching as the kernels do. */
int read_all(const char *p, size_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
        _mm_prefetch(p + i + 4096, _MM_HINT_T0);
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const void *)(p + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const void *)(p + i + 32)));
    }
    return _mm256_extract_epi32(_mm256_or_si256(a, b), 0);
}
"""


def _compile(target: Path, arguments: list[str]) -> ctypes.CDLL:
    subprocess.run(["cc", "-O3", "-std=gnu11", "-shared", "-fPIC", "-o", target, *arguments], check=True)
    return ctypes.CDLL(str(target))


def loops(folder: Path) -> ctypes.CDLL:
    """The compiled loop over rows and the plain read loop."""
    source = folder / "loops.c"
    source.write_text(LOOPS)
    library = _compile(folder / "loops.so", ["-mavx2", str(source)])
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.rows.argtypes = [pointer, number, number, pointer, ctypes.c_size_t, pointer, pointer]
    library.read_all.argtypes = [pointer, ctypes.c_size_t]
    return library


def installed_libraries() -> Path | None:
    """Folder of libggml-cpu.so in the installed llama-cpp-python, or None."""
    spec = importlib.util.find_spec("llama_cpp")
    folder = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    return folder if folder and (folder / "libggml-cpu.so").exists() else None


def download_sdist(folder: Path) -> Path:
    """Source distribution of the installed version, through pip."""
    version = importlib.metadata.version("llama-cpp-python")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
    subprocess.run([*command, f"llama-cpp-python=={version}"], check=True)
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def load(libraries: Path, sdist: Path | None, cache: Path) -> tuple[ctypes.CDLL, str]:
    """(library with the vec_dot functions, what was built how). Without an sdist: as pip built it."""
    base = ctypes.CDLL(str(libraries / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    base.ggml_cpu_init()  # fills the tables that the dot products read
    if sdist is None:
        return base, "ggml as installed, which may use AVX-512"
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{sdist.name} {libraries} {AVX2_FLAGS}".encode()).hexdigest()[:12]
    target = cache / f"ggml-avx2-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as tar:
            names = [m for m in tar.getmembers() if any(p in m.name for p in PARTS) and m.name.endswith((".h", ".c"))]
            tar.extractall(folder, members=names, filter="data")
            top = next(Path(folder).glob("**/ggml/include")).parent.parent
            include = [f"-I{top / p}" for p in ("ggml/include", "ggml/src", "ggml/src/ggml-cpu")]
            linked = [str(libraries / name) for name in ("libggml-cpu.so", "libggml-base.so")]
            files = [str(top / s) for s in SOURCES]
            _compile(target, [*AVX2_FLAGS, "-D_GNU_SOURCE", *include, *files, *linked, f"-Wl,-rpath,{libraries}"])
    return ctypes.CDLL(str(target)), "ggml's vec_dot compiled for AVX2"


def symbol(format_name: str) -> str:
    name = format_name[:-1] + "K" if format_name.endswith("_k") else format_name
    return f"ggml_vec_dot_{name}_{PARTNER[format_name]}"


def activations(format_name: str, cols: int) -> np.ndarray:
    """One token in ggml's block form, uint8 [blocks, block bytes]: random int8, small scale, sums left at 0."""
    num_bytes, length, q_at, dtype = PARTNERS[PARTNER[format_name]]
    act = np.zeros((cols // length, num_bytes), np.uint8)
    scale = np.array(0.01, dtype)
    act[:, : scale.nbytes] = np.frombuffer(scale.tobytes(), np.uint8)
    q = np.random.default_rng(2).integers(-127, 128, (len(act), length), dtype=np.int8)
    act[:, q_at : q_at + length] = q.view(np.uint8)
    return act
