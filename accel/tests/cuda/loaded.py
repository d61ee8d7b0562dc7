# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs a program, and then writes the files of all modules that it loaded: `loaded.py FILE PROGRAM ARGUMENT…`. For guests that shall have these and no more."""

import runpy
import sys

to, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
with open(to, "w") as out:
    out.writelines(f"{file}\n" for file in sorted(filter(None, files)) if file != __file__)
