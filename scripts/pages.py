#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The commands and files in the guide's pages (docs/*.md): the one place that reads them, for tests and for scripts/check-docs.

    scripts/pages.py list KIND               the pages with commands of a kind
    scripts/pages.py file PAGE NAME          a page's file of this name, from all its pieces
    scripts/pages.py commands PAGE KIND      a page's commands of a kind with what they print, as JSON
    scripts/pages.py run PAGE KIND           runs them in this folder, as one person would at a terminal, and compares what they print
    scripts/pages.py excerpts LANGUAGE       the pages' excerpts, each with its place, as JSON
    scripts/pages.py names PROGRAM           looks for each `tombolo …` in the pages' text among PROGRAM's commands and options

A block of a page is fenced, and its first line says what it is:

    ```sh [KIND]      commands, each after '$ ' and with what it prints below; '…' stands for anything. A line that ends with a backslash goes on in the next.
    ```LANGUAGE NAME  a piece of the file NAME, which is there when the page's commands run
    ```LANGUAGE       an excerpt; one of a compose file (toml) must be understood by `tombolo config`

A test runs every block of commands. KIND says which test, and what it needs: none, a folder; 'system', folders of the system (SYSTEM below), which are
replaced; 'vm', the guest kit; 'services', the stand-in for QEMU; 'guest', a guest to run within; 'libvirt', a libvirtd. A block that no test can run has the
comment <!-- not run: REASON --> above it, and no '$'.
"""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
# What a page of kind 'system' may write to: its own while it runs.
SYSTEM = ("/run", "/dev/shm", "/etc", "/var/lib", "/usr/share")
KINDS = ("", "system", "vm", "services", "guest", "libvirt")


class Block:
    """A block of a page: its line, the language and the word behind that, its text, and why it is not run."""

    def __init__(self, line, about, text, why):
        self.line, self.text, self.why = line, text, why
        self.language, _, self.word = about.strip().partition(" ")

    def commands(self):
        """Pairs of a command and what it prints."""
        found = []
        lines = iter(self.text.splitlines(keepends=True))
        for line in lines:
            if not line.startswith("$ "):
                if found:
                    found[-1][1] += line
                continue
            command = line[2:]
            while command.endswith("\\\n"):
                command += next(lines, "")
            found.append([command.rstrip("\n"), ""])
        return found


def blocks(page):
    """The blocks of a page's text."""
    found, open_fence, why = [], None, None
    for number, line in enumerate(page.splitlines(), 1):
        fence = re.match(r"( *)```(.*)", line)
        if open_fence and line.strip() == "```":
            indent, start, about, lines, reason = open_fence
            text = "".join(l[indent:] + "\n" for l in lines)
            found.append(Block(start, about, text, reason))
            open_fence = None
        elif open_fence:
            open_fence[3].append(line)
        elif fence:
            open_fence = (len(fence[1]), number, fence[2], [], why)
        if not open_fence:
            marked = NOT_RUN.fullmatch(line.strip())
            why = marked[1] if marked else None
    return found


def pages(root=ROOT):
    """The guide's pages: path and text."""
    return [(page, page.read_text()) for page in sorted(root.glob("docs/*.md"))]


def indented(text):
    """Lines at which a block begins that is indented instead of fenced."""
    text = re.sub(r"^( *)```.*?^ *```$", lambda m: re.sub(r"[^\n]+", "", m[0]), text, flags=re.M | re.S)
    lines = text.splitlines()
    return [n for n, line in enumerate(lines, 1) if line.startswith("    ") and (n == 1 or not lines[n - 2].strip())]


def offences(root=ROOT):
    """Blocks of commands that no test runs and that don't say why: path and words."""
    tests = "\n".join(p.read_text() for pattern in ("cli/tests/*.rs", "vm/libvirt/tests/*.py") for p in sorted(root.glob(pattern)))
    for path, text in pages(root):
        for line in indented(text):
            yield path, f"line {line}: a block that is indented has no kind: fence it (scripts/pages.py)"
        for block in blocks(text):
            at = f"line {block.line}:"
            if not block.language:
                yield path, f"{at} the block does not say what it is (scripts/pages.py)"
            elif block.language != "sh":
                continue
            elif block.word not in KINDS and "." in block.word:
                continue
            elif block.word not in KINDS:
                yield path, f"{at} '{block.word}' is no kind of commands (scripts/pages.py)"
            elif block.why:
                if block.text.startswith("$ "):
                    yield path, f"{at} a block that is not run has no '$'"
            elif not block.text.startswith("$ "):
                yield path, f"{at} no test runs these commands: begin each with '$ ', or say why above the block: <!-- not run: REASON -->"
            # Tests ask for the pages of these two kinds themselves.
            elif block.word not in ("", "system") and f'"{path.name}", "{block.word}"' not in tests:
                yield path, f'{at} no test runs the commands of ("{path.name}", "{block.word}")'


def page(name):
    return blocks((ROOT / "docs" / name).read_text())


def file(name, wanted):
    return "".join(b.text for b in page(name) if b.language != "" and b.word == wanted)


def files(name):
    """The names of a page's files."""
    return list(dict.fromkeys(b.word for b in page(name) if "." in b.word))


def commands(name, kind):
    return [c for b in page(name) if b.language == "sh" and b.word == kind and not b.why for c in b.commands()]


def says(expected, output):
    """Whether the output is what a page has; a line '…' is any number of lines, and '…' within a line any words."""
    output = output.replace("\r", "").rstrip()
    parts = [r"(?:.*\n)*" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in expected.rstrip().splitlines()]
    return re.fullmatch("".join(parts), output + "\n" if output else "") is not None


def run(name, kind):
    """Runs a page's commands in one shell, in this folder."""
    all_commands = commands(name, kind)
    if not all_commands:
        sys.exit(f"pages.py: {name} has no commands of kind '{kind}'")
    for wanted in files(name):
        if not os.path.exists(wanted):
            pathlib.Path(wanted).write_text(file(name, wanted))
    with tempfile.TemporaryDirectory() as notes:
        script = ""
        for n, (command, _) in enumerate(all_commands):
            (pathlib.Path(notes) / f"{n}").write_text(command)
            script += f'eval "$(cat {notes}/{n})" >{notes}/{n}.out 2>{notes}/{n}.err </dev/null; echo $? >{notes}/{n}.status\n[ "$(cat {notes}/{n}.status)" = 0 ] || exit 1\n'
        subprocess.run(["bash", "-c", script, "bash"], stdin=subprocess.DEVNULL, check=False)
        for n, (command, expected) in enumerate(all_commands):
            read = lambda what: (pathlib.Path(notes) / f"{n}.{what}").read_text(errors="replace")
            status, out, err = read("status").strip(), read("out"), read("err")
            print(f"$ {command}", flush=True)
            if status != "0":
                sys.exit(f"{name}: $ {command}\nexit code {status}\n{out}{err}")
            if not says(expected, out):
                sys.exit(f"{name}: $ {command}\n--- printed:\n{out}--- the page has:\n{expected}--- standard error:\n{err}")
    print(f"{name}: {len(all_commands)} commands")


def mount(source, target, kind, flags, data=None):
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    if libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {target}")


MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def be_alone(given):
    """Replaces the folders of SYSTEM by memory, with links to what is in them. Files that a package brings are put there: pairs of source and place."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    with tempfile.TemporaryDirectory() as scratch:
        for folder in SYSTEM:
            below = os.path.join(scratch, "below")
            os.makedirs(below, exist_ok=True)
            mount(folder, below, None, MS_BIND | MS_REC)
            mount("tmpfs", folder, "tmpfs", 0, "mode=1777" if folder == "/dev/shm" else "mode=755")
            if folder in ("/run", "/dev/shm"):
                continue
            kept = f"/run/below{folder}"
            os.makedirs(kept)
            mount(below, kept, None, MS_BIND | MS_REC)
            for entry in os.listdir(kept):
                os.symlink(f"{kept}/{entry}", f"{folder}/{entry}")
        for source, place in given:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            subprocess.run(["install", "-m", "755", source, place], check=True)
        # The mounts end with this program's namespace; the folder below them is the host's.
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in SYSTEM:
            libc.umount2(os.path.join(scratch, "below").encode(), 2)


def alone(words):
    """Becomes this script again in a mount namespace of its own: an ordinary user has it by a user namespace, and stays that user."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    os.execvp("unshare", ["unshare", *user, "--mount", sys.executable, __file__, "inside", *words])


def option(text):
    """The long options of a command's help."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def names(program):
    """Inline commands of the pages and of README that PROGRAM does not have: path, command and what is wrong."""
    helps = {}

    def helped(path):
        if path not in helps:
            done = subprocess.run([program, *path, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            helps[path] = done.stdout if done.returncode == 0 else None
        return helps[path]

    count = 0
    for path, text in [*pages(), (ROOT / "README.md", (ROOT / "README.md").read_text())]:
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
        for command in re.findall(r"(?<!`)`(tombolo [^`]+)`(?!`)", prose):
            words = re.split(r"[|;&><…(]| -- ", command)[0].split()[1:]
            at, rest = (), list(words)
            while rest and rest[0] in ("-v", "--json"):
                rest.pop(0)
            if not rest or not re.fullmatch(r"[a-z][a-z-]*", rest[0]):
                continue
            count += 1
            while rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
                text_there = helped(at)
                listed = re.search(r"^Commands:\n((?: .*\n)+)", text_there, flags=re.M)
                if not listed:
                    break
                if not re.search(rf"^  {rest[0]}( |$)|\[alias(?:es)?: (?:.*, )?{rest[0]}[,\]]", listed[1], flags=re.M):
                    yield path, command, f"'tombolo {' '.join(at)}' has no command '{rest[0]}'"
                    break
                at += (rest.pop(0),)
            text_there = helped(at)
            if text_there is None:
                yield path, command, f"'tombolo {' '.join(at)}' can't be run"
                continue
            usage = re.search(r"^Usage: (.*)", text_there, flags=re.M)[1].replace("[OPTIONS]", "").replace("[COMMAND]", "")
            free = [w for w, before in zip(rest, ["", *rest]) if not w.startswith("-") and not before.startswith("-")]
            if free and not re.search(r"[<\[]", usage):
                yield path, command, f"'tombolo {' '.join(at)}' takes no '{free[0]}'"
            for word in rest:
                wanted = re.match(r"(--[a-z][\w-]*)", word)
                short = re.fullmatch(r"-[a-zA-Z]", word)
                if wanted and wanted[1] not in option(text_there) | option(helped(())):
                    yield path, command, f"'tombolo {' '.join(at)}' has no option {wanted[1]}"
                if short and not re.search(rf"(?<![\w-]){short[0]}[, ]", text_there + helped(())):
                    yield path, command, f"'tombolo {' '.join(at)}' has no option {short[0]}"
    if count < 100:
        yield ROOT / "docs", "", f"only {count} commands were found in the pages' text"


def main():
    what, *words = sys.argv[1:] or [""]
    if what == "list" and len(words) == 1:
        for path, _ in pages():
            if commands(path.name, words[0]):
                print(path.name)
    elif what == "file" and len(words) == 2:
        sys.stdout.write(file(*words))
    elif what == "commands" and len(words) == 2:
        json.dump(commands(*words), sys.stdout)
    elif what == "excerpts" and len(words) == 1:
        named = [(f"{path.name}, line {b.line}", b) for path, text in pages() for b in blocks(text)]
        json.dump([(place, b.text) for place, b in named if b.language == words[0] and not b.word], sys.stdout)
    elif what == "run" and len(words) == 2 and words[1] == "system":
        alone(words)
    elif what == "run" and len(words) == 2:
        run(*words)
    elif what == "inside" and len(words) == 2:
        be_alone([(str(ROOT / "vm/proxmox/tombolo-hook"), "/usr/share/tombolo/tombolo-hook")])
        run(*words)
    elif what == "names" and len(words) == 1:
        found = list(names(words[0]))
        for path, command, why in found:
            print(f"{path.relative_to(ROOT)}: `{command}`: {why}")
        sys.exit(bool(found))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
