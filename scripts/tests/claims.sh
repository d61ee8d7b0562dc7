# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Claims about an installation, a line each; to be sourced by what runs within it. `counts` closes.
passed=0 failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# claim WORDS COMMAND...: a test; what the command said is shown where it fails.
claim() {
    local words=$1
    shift
    if "$@" >"$scratch/said" 2>&1; then
        printf 'ok      %s\n' "$words"
        passed=$((passed + 1))
    else
        printf 'FAILED  %s\n' "$words"
        tail -n 25 "$scratch/said" | sed 's/^/  | /'
        failed=$((failed + 1))
    fi
}

# The counts of this run, and an exit code that tells whether all claims held.
counts() {
    printf '%d passed, %d failed\n' "$passed" "$failed"
    ((!failed))
}

# All files but those of the package manager's own book-keeping, of the machine, the kernel's lists of modules, and DKMS' own keys.
files() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /opt -o -path /root -o -path /var/lib/dpkg -o -path /var/lib/apt \
        -o -path /var/cache -o -path /var/log -o -path '/usr/lib/modules/*/modules.*' -o -path /boot -o -path '/var/lib/dkms/mok.*' -o -regex '/etc/\(passwd\|group\|shadow\|gshadow\)-' \) -prune -o -print | sort
}

# install_from DIR PACKAGE...: packages from DIR. The installation has no package lists, so nothing comes from elsewhere.
install_from() {
    local dir=$1 name debs=()
    shift
    for name in "$@"; do debs+=("$dir/${name}"_*.deb); done
    apt-get -q=2 --no-install-recommends install "${debs[@]}"
}

# says WORDS COMMAND...: the command succeeds and its output holds the words.
says() {
    local words=$1
    shift
    "$@" >"$scratch/heard" 2>&1 || { cat "$scratch/heard"; return 1; }
    grep -F -- "$words" "$scratch/heard" || { cat "$scratch/heard"; return 1; }
}

# refused WORDS COMMAND...: the command fails and its output holds the words.
refused() {
    local words=$1
    shift
    if "$@" >"$scratch/refused" 2>&1; then cat "$scratch/refused"; return 1; fi
    grep -F -- "$words" "$scratch/refused" || { cat "$scratch/refused"; return 1; }
}

# left_as_before LIST: the files are those of the list that `files` wrote before.
left_as_before() {
    files >"$scratch/after"
    diff "$1" "$scratch/after"
}
