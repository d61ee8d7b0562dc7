# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fresh installations of Debian releases to try things in; to be sourced in the repository's root. Needs root and mmdebstrap.
root=$PWD
# shellcheck source=../../guest/cache.sh
. guest/cache.sh

die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }
((EUID == 0)) || die 'a root of its own needs root: run it with sudo'
command -v mmdebstrap >/dev/null || die 'mmdebstrap is missing: apt-get install mmdebstrap'

# base_root NAME RELEASE PACKAGES: .cache/roots/NAME, a minimal installation with these packages (separated by commas) besides, made once for each list.
base_root() {
    local name=$1 release=$2 packages=$3 mirror
    base=$cache/roots/$name
    [[ $(cat "$base.packages" 2>/dev/null) != "$packages" ]] || return 0
    mirror=$(apt-get indextargets --no-release-info --format '$(COMPONENT) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "main" && $2 !~ /security/ && !u { u = $2 } END { print u }')
    mkdir -p "$cache/roots"
    rm -rf "$base.new"
    mmdebstrap --quiet --variant=minbase --include="$packages" "$release" "$base.new" \
        "deb $mirror $release main" "deb $mirror $release-updates main"
    # Names are resolved and certificates checked as on this machine.
    cp --remove-destination /etc/resolv.conf "$base.new/etc/resolv.conf"
    cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$base.new/etc/machine-certificates.pem"
    rm -rf "$base" "$base.packages"
    mv "$base.new" "$base"
    printf '%s\n' "$packages" >"$base.packages"
}

# Folders that are removed when the script ends.
dropped=()
trap 'rm -rf "${dropped[@]}"' EXIT

# copy_root FROM: $run, a copy of the installation at FROM, so that nothing an earlier run installed is there. It goes when the script ends.
copy_root() {
    run=$(mktemp -d "$cache/roots/run.XXXXXX")
    dropped+=("$run")
    cp -a "$1/." "$run/"
    # It never outlives a crash of this machine: dpkg need not wait for the disk.
    printf 'force-unsafe-io\n' >"$run/etc/dpkg/dpkg.cfg.d/unsafe-io"
}

# in_root DIR FOLDER COMMAND...: runs a command in the installation at DIR, in FOLDER there. Words NAME=VALUE before COMMAND are its environment. Mounts
# and processes end with it.
in_root() {
    unshare --mount --pid --fork bash -euo pipefail -c '
        run=$1 folder=$2
        shift 2
        mount --make-rprivate /
        mount --bind "$run" "$run"
        mount -t proc proc "$run/proc"
        mount --rbind /sys "$run/sys"
        mount --rbind /dev "$run/dev"
        mount -t tmpfs tmpfs "$run/dev/shm"
        mount -t tmpfs tmpfs "$run/run"
        # No chroot: in one, the kernel refuses user namespaces, which passt and others confine themselves with.
        cd "$run"
        mkdir -p old
        pivot_root . old
        umount -l /old
        rmdir /old
        cd "$folder"
        exec /usr/bin/env -i HOME=/root TERM=dumb CI=true PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            SSL_CERT_FILE=/etc/machine-certificates.pem CARGO_HTTP_CAINFO=/etc/machine-certificates.pem "$@"
    ' in_root "$@"
}
