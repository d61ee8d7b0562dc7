# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The `cargo test` commands of SPECIFICATION.md. Cargo takes one name of tests, and it counts for each target that the command names; a name that
fits no test runs none, with success."""

import re
import shlex

# Options of `cargo test` with a value of their own, other than those that are looked at.
WITH_VALUE = ("--features", "--bin")


class Command:
    """The crate, the targets (library: None) and the names of a `cargo test`."""

    def __init__(self, text):
        self.crate, self.targets, self.names = None, [], []
        words = iter(shlex.split(text)[2:])
        for word in words:
            if word == "-p":
                self.crate = next(words, None)
            elif word == "--test":
                self.targets.append(next(words, None))
            elif word == "--lib":
                self.targets.append(None)
            elif word in WITH_VALUE:
                next(words, None)
            elif word == "--":
                break
            elif not word.startswith("-"):
                self.names.append(word)


def commands(page):
    """Each command with its line, from the last column of the table."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("|"):
            continue
        for code in re.findall(r"`([^`]*)`", line.split(" | ")[-1]):
            for text in code.split("&&"):
                if text.strip().startswith("cargo test"):
                    yield number, text.strip()


def crates(root):
    """The folder of each crate, by its name."""
    found = {}
    for manifest in root.glob("**/Cargo.toml"):
        name = re.search(r'^name = "([^"]+)"', manifest.read_text(), flags=re.M)
        if name and not {"target", ".cache"} & set(manifest.relative_to(root).parts):
            found[name[1]] = manifest.parent
    return found


def paths_of_tests(crate, target):
    """The paths that a name is compared with: each function of the target, also those that are no tests, behind the modules of its file."""
    base = crate / "tests" / target if target else crate / "src"
    files = [*base.rglob("*.rs"), *([base.with_suffix(".rs")] if target else [])]
    for file in files:
        if file.is_file():
            modules = file.relative_to(base).with_suffix("").parts if file.is_relative_to(base) else ()
            for function in re.findall(r"\bfn (\w+)", file.read_text()):
                yield "::".join([*modules, "tests", function])


def offences(root):
    """Commands that cargo refuses, or that run no test of one of their targets: path and words."""
    page = root / "SPECIFICATION.md"
    if not page.is_file():
        return
    folders = crates(root)
    for number, text in commands(page):
        command = Command(text)
        at = f"line {number}: `{text}`"
        if command.crate not in folders:
            yield page, f"{at} names no crate"
        elif len(command.names) > 1:
            yield page, f"{at} has more than one name of tests; cargo takes one"
        else:
            for target in command.targets:
                paths = list(paths_of_tests(folders[command.crate], target))
                if not any(name in path for path in paths for name in command.names or [""]):
                    yield page, f"{at} runs no test of {target or 'the library'}"
