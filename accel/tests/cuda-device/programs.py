#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""CUDA programs, compiled by NVIDIA's own nvcc against its unmodified runtime, on the test device.

programs.py --target DIR            two programs, runtime 13.5 as a shared library
programs.py --target DIR --long     all programs with the shared and the static runtime of 13.5 and the shared one of 12.9, NVRTC of both,
                                    numba-cuda, and tinygrad's training of a convolutional net to 95 % of unseen digits

The compiler and runtimes come from PyPI into the cache (TOMBOLO_CACHE), once.
"""

import argparse
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE.parent / "cuda"
CACHE = pathlib.Path(os.environ.get("TOMBOLO_CACHE", HERE.parents[2] / ".cache")) / "cuda-device"
PROGRAMS = ["gemm", "reduce", "streams", "memory", "functions", "groups", "graphs", "copies", "pools"]
SHORT = ["reduce", "streams"]
NVCC = ["nvidia-cuda-nvcc==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-nvvm==13.5.37", "nvidia-cuda-runtime==13.5.37", "nvidia-cuda-cccl==13.3.5.0.6"]
# No nvcc is packaged for 12.9: its runtime is linked to what nvcc 13.5 compiles.
OTHERS = ["nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvrtc-cu12==12.9.86"]
NUMBA = ["numba-cuda[cu12]==0.30.4", "numpy"]


def environment(name, names, options=()):
    """A virtual environment with these packages."""
    place = CACHE / name
    stamp = place / "have"
    wanted = "\n".join(names)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *options, *names], check=True)
        stamp.write_text(wanted)
    return place


def packages(long):
    """The folder `nvidia` of the compiler's environment."""
    place = environment("venv-long" if long else "venv", NVCC + OTHERS if long else NVCC, ["--no-deps"])
    (nvidia,) = place.glob("lib/python3*/site-packages/nvidia")
    # The linker looks for names without versions.
    for library in nvidia.glob("*/lib/lib*.so.1[23]"):
        plain = library.with_name(library.name.rsplit(".", 1)[0])
        if not plain.exists():
            plain.symlink_to(library.name)
    return nvidia


def driver(target):
    """A folder with the device under the name that programs look for."""
    folder = CACHE / "driver"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcuda.so.1"
    fresh = folder / f"fresh-{os.getpid()}"
    fresh.symlink_to((target / "libtombolo_cuda_device.so").resolve())
    fresh.replace(link)
    return folder


def compile_program(nvidia, name, runtime):
    """The program, linked with the runtime: shared, static or 12.9."""
    toolkit = nvidia / "cu13"
    program = CACHE / f"{name}-{runtime}"
    link = {
        "shared": ["-cudart", "shared", f"-L{toolkit}/lib"],
        "static": ["-cudart", "static", f"-L{toolkit}/lib"],
        "12.9": ["-cudart", "none", f"-L{nvidia}/cuda_runtime/lib", "-lcudart"],
    }[runtime]
    command = [toolkit / "bin/nvcc", "-std=c++17", "-arch=compute_80", "-code=compute_80", SOURCES / f"{name}.cu", "-o", program, *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: nvcc failed\n{done.stdout}{done.stderr}")
    return program


def compile_c(nvidia, name, release):
    folder = nvidia / ("cu13" if release == "13" else "cuda_nvrtc")
    headers = nvidia / "cu13/include"
    program = CACHE / f"{name}-nvrtc-{release}"
    command = ["cc", "-O1", f"-I{headers}", SOURCES / f"{name}.c", "-o", program, f"-L{folder}/lib", "-lnvrtc", f"-L{CACHE}/driver", "-l:libcuda.so.1"]
    subprocess.run(command, check=True)
    return program, folder / "lib"


def run(label, program, libraries, limit=300):
    """Runs a program, which ends with `ok`. Returns whether it did."""
    variables = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    command = program if isinstance(program, list) else [program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=variables)
    good = done.returncode == 0 and done.stdout.endswith("ok\n")
    print(f"{'ok    ' if good else 'FAILED'} {label}")
    if not good:
        print(f"exit {done.returncode}\n{done.stdout}{done.stderr}")
    return good


def run_python(device):
    """A framework that generates kernels. numba links with the driver, so that its image is PTX: nvJitLink would make machine code."""
    numba = environment("numba", NUMBA)
    subprocess.run([numba / "bin/pip", "uninstall", "--quiet", "--yes", "nvidia-nvjitlink-cu12"], check=True)
    return run("numba-cuda", [numba / "bin/python", SOURCES / "numba_kernels.py"], [device])


def run_tinygrad(device):
    """A training, with the framework's own compiler to PTX."""
    folder = subprocess.run([HERE.parent / "cuda-toolkit", "tinygrad"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    variables = ["DEV=CUDA:PTX", f"PYTHONPATH={folder}", f"TOMBOLO_DIGITS={folder}", "CACHELEVEL=0"]
    return run("tinygrad", ["env", *variables, sys.executable, SOURCES / "tinygrad_digits.py", "lenet", "300", "95"], [device], 700)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=pathlib.Path, required=True, help="cargo's target folder with the built device")
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    nvidia = packages(arguments.long)
    device = driver(arguments.target)
    ran = []
    for name in PROGRAMS if arguments.long else SHORT:
        for runtime in ["shared", "static", "12.9"] if arguments.long else ["shared"]:
            libraries = [device, nvidia / ("cuda_runtime/lib" if runtime == "12.9" else "cu13/lib")]
            ran.append(run(f"{name}, runtime {runtime}", compile_program(nvidia, name, runtime), libraries))
    for release in ["13", "12"] if arguments.long else []:
        program, library = compile_c(nvidia, "nvrtc", release)
        ran.append(run(f"nvrtc {release}", program, [device, library]))
    if arguments.long:
        ran.append(run_python(device))
        ran.append(run_tinygrad(device))
    print(f"{sum(ran)} passed, {len(ran) - sum(ran)} failed")
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
