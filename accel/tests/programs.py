#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Real OpenCL programs, each natively and forwarded to a server process, compared line by line: `programs.py [--target DIR] [PROGRAM…]`.

What may differ between two native runs (times, speeds, colours) is taken out before. pyopencl's own tests are those of the version that
is installed, fetched once from its source distribution; each file of them is a program. `clblast` and `pyopencl` name all of theirs. Prints a
line per program: how many lines, how many of them are the program's own results, seconds; and then the counts. Exit code 0 when no line
differs.
"""
import argparse, collections, glob, os, re, shutil, socket, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../.."))
CACHE = os.path.abspath(os.environ.get("TOMBOLO_CACHE", os.path.join(ROOT, ".cache")))
LIMIT = 1500  # seconds of one run
PYTHON = "/usr/bin/python3"  # the one that Debian's pyopencl belongs to
OUTCOME = re.compile(r" (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\b")
NUMBER = re.compile(r"\d+(\.\d+)?")


def listens(path):
    """Whether a socket is served: it has its name a moment before that."""
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(path) == 0


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def device_properties(text):
    """clinfo's lines. PoCL of Debian 13 has fine-grained system memory, which no forwarded device has (accel/README.md)."""
    return plain(re.sub(r"(Fine-grained system sharing +)Yes", r"\1No", text))


def numbers_away(text):
    return [NUMBER.sub("#", line).rstrip() for line in plain(text)]


def cracked(text):
    """hashcat's results: what it says of the self-test, the hash with its password, and how it ended."""
    return [line for line in plain(text) if re.match(r"(Status\.|Recovered\.|[0-9a-f]{32}:|.*[Ss]elf-test)", line)]


def pytest_results(text):
    """One line per test, without the folder that its file lies in."""
    return sorted(re.sub(r"^\S*?(?=\w+\.py::)", "", line) for line in plain(text) if "::" in line and OUTCOME.search(line))


def tally(lines):
    """How many tests ended how; empty where lines are no tests."""
    ends = collections.Counter(m.group(1).lower() for m in map(OUTCOME.search, lines) if m)
    return ", ".join("%d %s" % (n, end) for end, n in ends.most_common())


def pyopencl_tests(work):
    """The files of pyopencl's own tests, the shortest first, of the version that is installed: no package has them, its source distribution does."""
    version = subprocess.run([PYTHON, "-c", "import pyopencl; print(pyopencl.VERSION_TEXT)"], capture_output=True, text=True, check=True).stdout.strip()
    folder = os.path.join(CACHE, "accel/pyopencl-" + version)
    if not os.path.exists(folder):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        subprocess.run([PYTHON, "-m", "venv", work + "/venv"], check=True)
        subprocess.run([work + "/venv/bin/pip", "download", "--quiet", "--no-deps", "--no-binary", "pyopencl", "--dest", work, "pyopencl==" + version], check=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as fresh:
            subprocess.run(["tar", "-xzf", *glob.glob(work + "/pyopencl-*.tar.gz"), "-C", fresh], check=True)
            os.rename(os.path.join(fresh, "pyopencl-" + version), folder)
    return sorted(glob.glob(folder + "/test/test_*.py"), key=os.path.getsize)


# The arguments of programs, natively and in a VM.
PASSWORD = "5f4dcc3b5aa765d61d8327deb882cf99"
HASHCAT = ["hashcat", "-D", "1", "-m", "0", "-a", "0", "--potfile-disable", "--force", PASSWORD]
WORDS = "foo\nbar\npassword\nletmein\n"
PYTEST = [PYTHON, "-m", "pytest", "-v", "-o", "console_output_style=classic", "-p", "no:cacheprovider"]


def programs(work, o):
    """Name, command, what of its output counts, and how a line that is a result looks."""
    def built(name, compiler, source, *flags):
        subprocess.run([compiler, "-O1", "-w", os.path.join(HERE, source), "-o", work + "/" + name, *flags, "-lOpenCL", "-lpthread"], check=True)
        return [work + "/" + name]

    with open(work + "/words", "w") as f:
        f.write(WORDS)
    known = {
        "clinfo": lambda: (["clinfo"], device_properties, r"\S"),
        "calls": lambda: (built("calls", "cc", "calls.c"), plain, r"\S"),
        "image": lambda: (built("image", "cc", "image.c"), plain, r"[0-9a-f]{8}$"),
        "viennacl": lambda: (built("gemm", "c++", "gemm.cpp"), plain, r"^(gemm|cg):"),
        **{"clblast-" + t: (lambda t=t: (["clblast_test_" + t], plain, r"test\(s\)")) for t in ("xaxpy", "xdot", "xhad", "xgemv")},
        "hashcat": lambda: ([*HASHCAT, work + "/words"], cracked, r"\S"),
        "clpeak": lambda: (["clpeak"], numbers_away, r"#$"),
    }

    if not o.programs or any(w.startswith("pyopencl") for w in o.programs):
        for path in pyopencl_tests(work):
            name = os.path.basename(path)[len("test_"):-len(".py")]
            known["pyopencl-" + name] = lambda path=path: ([*PYTEST, path], pytest_results, "PASSED")
    chosen = []
    for wanted in o.programs or known:
        found = [name for name in known if name == wanted or name.startswith(wanted + "-")]
        if not found:
            sys.exit("no such program here: %s; there are %s" % (wanted, ", ".join(known)))
        chosen += found
    for name in chosen:
        yield (name, *known[name]())


def run(command, environment, work):
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
        return done.stdout, done.returncode, done.stderr, time.monotonic() - begun
    except subprocess.TimeoutExpired as e:
        return (e.stdout or b"").decode(errors="replace"), "no end after %d s" % LIMIT, (e.stderr or b"").decode(errors="replace"), LIMIT


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", default=os.path.join(ROOT, "target/release"), help="where tombolo-accel and libtombolo_opencl.so are")
    p.add_argument("programs", nargs="*")
    o = p.parse_args()
    work = tempfile.mkdtemp(prefix="tombolo-programs-")
    native = dict(os.environ, POCL_CACHE_DIR=work + "/cache", XDG_CACHE_HOME=work + "/xdg", POCL_MEMORY_LIMIT="6", XDG_DATA_HOME=work + "/data")
    native.pop("OCL_ICD_VENDORS", None)
    for folder in ("cache", "xdg", "data", "vendors"):
        os.makedirs(os.path.join(work, folder))
    with open(work + "/vendors/tombolo.icd", "w") as f:
        f.write(os.path.abspath(o.target) + "/libtombolo_opencl.so")
    forwarded = dict(native, OCL_ICD_VENDORS=work + "/vendors", TOMBOLO_ACCEL="unix:%s/socket" % work)
    server = subprocess.Popen([o.target + "/tombolo-accel", "serve", "--listen", "unix:%s/socket" % work, "--memory", "8192"], env=native, stderr=subprocess.DEVNULL)
    same = differ = 0
    try:
        while not listens(work + "/socket"):
            if server.poll() is not None:
                sys.exit("the server doesn't serve")
            time.sleep(0.05)
        for name, command, counts, result in programs(work, o):
            # Once before, so that both find their kernels compiled.
            run(command, native, work)
            a, a_code, _, a_time = run(command, native, work)
            said, b_code, b_err, b_time = run(command, forwarded, work)
            a, b = counts(a), counts(said)
            results = sum(1 for line in a if re.search(result, line))
            wrong = [(x, y) for x, y in zip(a, b) if x != y]
            fine = not wrong and len(a) == len(b) and a_code == b_code and results
            print("%s %-14s %4d lines, %d results; %.1f s natively, %.1f s forwarded" % ("same  " if fine else "DIFFER", name, len(a), results, a_time, b_time), flush=True)
            if tally(a):
                print("    natively %s; forwarded %s" % (tally(a), tally(b)))
            if not fine:
                print("    exit codes %s and %s, %d and %d lines" % (a_code, b_code, len(a), len(b)))
                for x, y in wrong[:20]:
                    print("    natively  %s\n    forwarded %s" % (x, y))
                print("    " + "\n    ".join(said.splitlines()[-40:] + b_err.splitlines()[-8:]), flush=True)
            same, differ = same + bool(fine), differ + (not fine)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(work)
    print("%d passed, %d failed" % (same, differ))
    sys.exit(1 if differ or not same else 0)


if __name__ == "__main__":
    main()
