"""Static metadata lives in pyproject.toml. This file only compiles each tiered C file once per CPU tier."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, "native")
import build as native  # (native/build.py)


class BuildNative(build_ext):
    """build_ext that adds one object per (tiered file, tier) before cffi's own module is linked."""

    def build_extension(self, ext):
        table = Path(self.build_temp, "gen", "kernel_tables.h")
        table.parent.mkdir(parents=True, exist_ok=True)
        if not table.exists() or table.read_text() != native.kernel_tables():
            table.write_text(native.kernel_tables())
        ext.include_dirs.append(str(table.parent))
        headers = [*Path("native").rglob("*.h"), *Path("tests/native").glob("*.h"), Path("native/build.py")]
        newest_header = max(p.stat().st_mtime for p in headers)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = list(native.objects())
            ext.extra_objects += pool.map(lambda job: self.compile_one(*job, newest_header), jobs)
        super().build_extension(ext)

    def compile_one(self, source, tier, args, newest_header):
        out = str(Path(self.build_temp, tier))
        (obj,) = self.compiler.object_filenames([source], output_dir=out)
        if not Path(obj).exists() or Path(obj).stat().st_mtime < max(newest_header, Path(source).stat().st_mtime):
            self.compiler.compile([source], output_dir=out, extra_postargs=args)
        return obj


setup(cffi_modules=["native/build.py:make_ffi"], cmdclass={"build_ext": BuildNative})
