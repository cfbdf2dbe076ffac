"""Builds the native code with the package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
sys.path.insert(0, str(Path(__file__).parent / "services/speculator"))
from treeserve_kernels.cpu import build as kernels
from treeserve_kernels.shared_object import BuildError
from treeserve_speculator.native import build as drafting

BUILDERS = {
    "treeserve_kernels.cpu.libtreeserve_cpu": kernels,
    "treeserve_speculator.native.libtreeserve_drafting": drafting,
}


class BuildNative(build_ext):
    """Compiles shared objects that are loaded by path: they are no Python modules."""

    def build_extension(self, ext: Extension) -> None:
        """Build one. All are optional: setuptools reports this error and installs without it."""
        try:
            BUILDERS[ext.name].build(Path(self.get_ext_fullpath(ext.name)).parent)
        except BuildError as error:
            raise CompileError(f"{error}\nThe int8 engine needs its kernels; all else runs without, slower.") from error

    def get_ext_filename(self, fullname: str) -> str:
        """Its name as its loader expects it, without the Python version."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in BUILDERS],
    cmdclass={"build_ext": BuildNative},
)
