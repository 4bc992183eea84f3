"""What is compiled at installation: the events' way by Cython, the core by mypyc. pyproject.toml has all the rest.

Both are optional. Without a C compiler the same files run as Python.
"""

import os
import runpy
import sys

from setuptools import Extension, setup

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
AS_PYTHON_COUNTS = "-ffp-contract=off"  # Arm multiplies and adds in one rounding; a decision would not be Python's


def core() -> list[Extension]:
    """The modules of balanceroute/native.py; none where mypyc cannot take them, or they are beside their sources."""
    if "editable_wheel" in sys.argv and NATIVE["library"]() is not None:
        return []  # other extras of the same sources
    try:
        from mypyc.build import mypycify

        paths = map(str, NATIVE["SOURCES"].values())
        found = mypycify([*ALONE, *paths], group_name=f"balanceroute.{NATIVE['group']()}", opt_level="2")
    except (Exception, SystemExit) as error:  # mypycify ends the process where mypy finds an error
        print(f"The core stays Python: {error}", file=sys.stderr)
        return []
    for extension in found:
        extension.optional = True
        kept = [arg for arg in extension.extra_compile_args if arg not in FOR_ITS_AUTHORS]
        extension.extra_compile_args = [*kept, AS_PYTHON_COUNTS]
    return found


setup(
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
