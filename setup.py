"""What is compiled at installation: the events' way by Cython, the core by mypyc. pyproject.toml has all the rest.

Both are optional. Without a C compiler the same files run as Python.
"""

import os
import runpy
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sys.version_info < (3, 11):  # noqa: UP036 - pip looks at requires-python only after this file has run
    sys.exit("balanceroute needs Python 3.11 or newer; this is {}.{}".format(*sys.version_info))
NATIVE = runpy.run_path("balanceroute/native.py")
BUILDS = {"bdist_wheel", "build", "build_ext", "editable_wheel"}  # commands; the others only ask for the metadata
ALONE = (  # the package's strict check needs what is not installed yet, its dependencies
    "--cache-dir=/dev/null",
    "--config-file=",
    "--ignore-missing-imports",
    "--follow-imports=silent",  # what is only imported is not compiled, and may build on one that is missing
    "--disable-error-code=import-untyped",
)
FOR_ITS_AUTHORS = ("-Werror",)  # another compiler than those they know may warn of more
FLAGS = (
    "-ffp-contract=off",  # Arm multiplies and adds in one rounding; a decision would not be Python's
    "-fvisibility=hidden",  # modules of one library call each other directly
)


class SideBySide(build_ext):
    """Compiles the files of one extension on all cores: the core has a hundred files, which take minutes on one."""

    def build_extensions(self) -> None:
        in_turn = self.compiler.compile

        def side_by_side(sources: Iterable[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(chain.from_iterable(pool.map(lambda source: in_turn([source], **options), sources)))

        self.compiler.compile = side_by_side
        super().build_extensions()


def core() -> list[Extension]:
    """The modules of balanceroute/native.py; none where mypyc cannot take them, or they are beside their sources."""
    if "editable_wheel" in sys.argv and NATIVE["library"]() is not None:
        return []  # other extras of the same sources
    try:
        from mypyc.build import mypycify

        paths = map(str, NATIVE["SOURCES"].values())
        group = f"balanceroute.{NATIVE['group']()}"
        found = mypycify([*ALONE, *paths], group_name=group, opt_level="2", debug_level="0", multi_file=True)
    except (Exception, SystemExit) as error:  # mypycify ends the process where mypy finds an error
        print(f"The core stays Python: {error}", file=sys.stderr)
        return []
    for extension in found:
        extension.optional = True
        kept = [arg for arg in extension.extra_compile_args if arg not in FOR_ITS_AUTHORS]
        extension.extra_compile_args = [*kept, *FLAGS]
        extension.include_dirs += ["build/balanceroute"]  # where mypyc writes its headers, but does not look for them
    return found


setup(
    cmdclass={"build_ext": SideBySide},
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
    ext_modules=[
        Extension(
            "balanceroute.proxy.hotpath.compiled",
            ["balanceroute/proxy/hotpath/events.py"],
            depends=["balanceroute/proxy/hotpath/compiled.pxd"],  # its C types
            extra_compile_args=["-O3"],
            optional=True,
        ),
        *(core() if BUILDS.intersection(sys.argv) else ()),
    ],
)
