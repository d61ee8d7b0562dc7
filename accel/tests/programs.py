#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Real OpenCL programs, each natively and forwarded to a server process, compared line by line: `programs.py [--target DIR] [PROGRAM…]`.

What may differ between two native runs (times, speeds, colours) is taken out before. pyopencl's own tests need --pyopencl DIR, the
folder test/ of its source distribution of the version that is installed. Prints a line per program: how many lines, how many of
them are the program's own results, seconds; and then the counts. Exit code 0 when no line differs.
"""
import argparse, os, re, shutil, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../.."))
LIMIT = 1500  # seconds of one run
NUMBER = re.compile(r"\d+(\.\d+)?")


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def numbers_away(text):
    return [NUMBER.sub("#", line).rstrip() for line in plain(text)]


def cracked(text):
    """hashcat's results: what it says of the self-test, the hash with its password, and how it ended."""
    return [line for line in plain(text) if re.match(r"(Status\.|Recovered\.|[0-9a-f]{32}:|.*[Ss]elf-test)", line)]


def pytest_results(text):
    """One line per test."""
    return sorted(re.sub(r"\s+\[.*", "", line) for line in plain(text) if re.search(r" (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)", line))


def programs(work, o):
    """Name, command, what of its output counts, and how a line that is a result looks."""
    def built(name, compiler, source, *flags):
        subprocess.run([compiler, "-O1", "-w", os.path.join(HERE, source), "-o", work + "/" + name, *flags, "-lOpenCL", "-lpthread"], check=True)
        return [work + "/" + name]

    with open(work + "/words", "w") as f:
        f.write("foo\nbar\npassword\nletmein\n")
    password = "5f4dcc3b5aa765d61d8327deb882cf99"
    known = {
        "clinfo": lambda: (["clinfo"], plain, r"\S"),
        "calls": lambda: (built("calls", "cc", "calls.c"), plain, r"\S"),
        "image": lambda: (built("image", "cc", "image.c"), plain, r"[0-9a-f]{8}$"),
        "viennacl": lambda: (built("gemm", "c++", "gemm.cpp"), plain, r"^(gemm|cg):"),
        **{"clblast-" + t: (lambda t=t: (["clblast_test_" + t], plain, r"test\(s\)")) for t in ("xaxpy", "xdot", "xhad", "xgemv")},
        "hashcat": lambda: (["hashcat", "-D", "1", "-m", "0", "-a", "0", "--potfile-disable", "--force", password, work + "/words"], cracked, r"\S"),
        "clpeak": lambda: (["clpeak"], numbers_away, r"#$"),
    }
    if o.pyopencl:
        known["pyopencl"] = lambda: (["/usr/bin/python3", "-m", "pytest", "-v", "-p", "no:cacheprovider", o.pyopencl], pytest_results, r"\S")
    unknown = [p for p in o.programs if p not in known]
    if unknown:
        sys.exit("no such program here: %s; there are %s" % (", ".join(unknown), ", ".join(known)))
    for name in o.programs or known:
        yield (name, *known[name]())


def run(command, environment, work):
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
        return done.stdout, done.returncode, done.stderr, time.monotonic() - begun
    except subprocess.TimeoutExpired:
        return "", "no end after %d s" % LIMIT, "", LIMIT


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", default=os.path.join(ROOT, "target/release"), help="where tombolo-accel and libtombolo_opencl.so are")
    p.add_argument("--pyopencl", metavar="DIR")
    p.add_argument("programs", nargs="*")
    o = p.parse_args()
    work = tempfile.mkdtemp(prefix="tombolo-programs-")
    native = dict(os.environ, POCL_CACHE_DIR=work + "/cache", XDG_CACHE_HOME=work + "/xdg", POCL_MEMORY_LIMIT="2", XDG_DATA_HOME=work + "/data")
    native.pop("OCL_ICD_VENDORS", None)
    for folder in ("cache", "xdg", "data", "vendors"):
        os.makedirs(os.path.join(work, folder))
    with open(work + "/vendors/tombolo.icd", "w") as f:
        f.write(os.path.abspath(o.target) + "/libtombolo_opencl.so")
    forwarded = dict(native, OCL_ICD_VENDORS=work + "/vendors", TOMBOLO_ACCEL="unix:%s/socket" % work)
    server = subprocess.Popen([o.target + "/tombolo-accel", "serve", "--listen", "unix:%s/socket" % work], env=native, stderr=subprocess.DEVNULL)
    same = differ = 0
    try:
        while not os.path.exists(work + "/socket"):
            if server.poll() is not None:
                sys.exit("the server doesn't serve")
            time.sleep(0.05)
        for name, command, counts, result in programs(work, o):
            # Once before, so that both find their kernels compiled.
            run(command, native, work)
            a, a_code, _, a_time = run(command, native, work)
            b, b_code, b_err, b_time = run(command, forwarded, work)
            a, b = counts(a), counts(b)
            results = sum(1 for line in a if re.search(result, line))
            wrong = [(x, y) for x, y in zip(a, b) if x != y]
            fine = not wrong and len(a) == len(b) and a_code == b_code and results
            print("%s %-14s %4d lines, %d results; %.1f s natively, %.1f s forwarded" % ("same  " if fine else "DIFFER", name, len(a), results, a_time, b_time), flush=True)
            if not fine:
                print("    exit codes %s and %s, %d and %d lines" % (a_code, b_code, len(a), len(b)))
                for x, y in wrong[:20]:
                    print("    natively  %s\n    forwarded %s" % (x, y))
                print("    " + "\n    ".join(b_err.splitlines()[-8:]), flush=True)
            same, differ = same + bool(fine), differ + (not fine)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(work)
    print("%d passed, %d failed" % (same, differ))
    sys.exit(1 if differ or not same else 0)


main()
