"""Builds the native kernels with the package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from treeserve_kernels.cpu import build


class BuildKernels(build_ext):
    """Compiles one shared object, loaded by path: it is no Python module."""

    def build_extension(self, ext: Extension) -> None:
        """Build it. The extension is optional: setuptools reports this error and installs without it."""
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)).parent)
        except build.BuildError as error:
            raise CompileError(f"{error}\nThe int8 engine needs these kernels; torch's does not.") from error

    def get_ext_filename(self, fullname: str) -> str:
        """Its name as `library.py` expects it, without the Python version."""
        return str(Path(*fullname.split(".")[:-1], build.LIBRARY_NAME))


setup(
    ext_modules=[Extension("treeserve_kernels.cpu.libtreeserve_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
