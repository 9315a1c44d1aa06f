"""Compiles the loader's module where there is a C compiler; without one shardkit installs, and runs, as well.

It reads and hashes blocks and copies rows in calls during which other threads run. Without it numpy and xxhash do the
same, and reading uncompressed samples takes up to twice as long.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("shardkit/loader/block_rows.c",)


class CompiledCopies(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to a wheel, or puts them beside their sources for an editable installation.

    ``SHARDKIT_COMPILE=0`` leaves them out, ``SHARDKIT_COMPILE=required`` ends the build where they cannot be had.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; on failure say so and go on."""
        if self.target_name != "wheel" or os.environ.get("SHARDKIT_COMPILE") == "0":
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        modules = {source: Path(source).with_suffix(suffix) for source in SOURCES}
        try:
            for source, module in modules.items():
                compile_extension(Path(self.root), Path(source), module)
        except Exception as error:  # no compiler, no headers, a compiler that refuses: all the same here
            if os.environ.get("SHARDKIT_COMPILE") == "required":
                raise
            self.app.display_warning(f"{source} was not compiled ({error}): shardkit runs without it, slower")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [module.as_posix() for module in modules.values()]


def compile_extension(root: Path, source: Path, module: Path) -> None:
    """Compile `source` to `module`, both relative to `root`; the module appears whole or not at all."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    with tempfile.TemporaryDirectory(dir=root / module.parent, prefix=".compiling-") as scratch:
        extension = Extension(source.stem, [str(root / source)], extra_compile_args=["-O3", "-Wall"])
        command = build_ext(Distribution({"ext_modules": [extension]}))
        command.build_lib = command.build_temp = scratch
        command.ensure_finalized()
        command.run()
        os.replace(command.get_ext_fullpath(source.stem), root / module)
