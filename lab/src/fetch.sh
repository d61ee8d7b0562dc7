#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# fetch.sh kernel|qemu|bochs INTO: unpacks the newest kernel, or the newest QEMU, that Debian has for this machine's release (backports included),
# or Debian 13's Bochs with what makes CDs for it, into the folder INTO, and prints the kernel's release. Uses the guest kit's own apt
# (common.sh beside this file): nothing is installed, and the machine's sources stay as they are.
set -euo pipefail
# shellcheck source=../../guest/common.sh
. "$(dirname "$0")/common.sh"

what=${1:?usage: fetch.sh kernel|qemu|bochs INTO}
into=${2:?usage: fetch.sh kernel|qemu|bochs INTO}
mkdir -p "$kit"
exec 9>"$kit/lock"
flock 9
if [[ $what == bochs ]]; then
    kit=$kit/trixie kit_release=trixie
fi
kit_apt_ready

newest() { kit_apt apt-cache madison "$1" | awk '{ print $3 }' | sort -Vr | sed -n 1p; }

case $what in
    kernel)
        version=$(newest linux-image-amd64)
        [[ $version ]] || die "Debian's archive for $(codename) has no linux-image-amd64"
        image=$(kit_apt apt-cache show "linux-image-amd64=$version" | sed -n 's/^Depends: \(linux-image-[^ ,]*\).*/\1/p' | sed -n 1p)
        say "kernel of the lab: $image ($version)"
        unpack_packages "$into" "$image=$version"
        depmod=$(command -v depmod || printf /sbin/depmod)
        "$depmod" -b "$into" "${image#linux-image-}"
        printf '%s\n' "${image#linux-image-}"
        ;;
    qemu)
        version=$(newest qemu-system-x86)
        say "QEMU of the lab: $version"
        seabios=$(newest seabios)
        unpack_packages "$into" "seabios=$seabios" qemu-system-{x86,common,data}="$version"
        ;;
    bochs)
        # This machine may have another release, so Bochs comes with its own loader and libraries. Its packages also depend on desktop settings and
        # icons, which it does not need without a screen.
        version=$(newest bochs)
        [[ $version ]] || die "Debian 13's archive has no bochs"
        say "Bochs of the lab: $version"
        mapfile -t packages < <(closure_of bochs bochs-term bochsbios vgabios genisoimage | grep -E '^(lib|zlib|bochs|vgabios|genisoimage)')
        ((${#packages[@]})) || die "apt can't resolve the packages of bochs"
        unpack_packages "$into" "${packages[@]}" isolinux syslinux-common
        rm -rf "${into:?}"/{etc,var,usr/share/{doc,man,locale,icons,lintian,menu}}
        # Built with Bochs' debugger, the curses display writes into the near end of a terminal of its own: who doesn't read the far end stops Bochs
        # after 64 KiB. /dev/null has no far end.
        sed -i 's,/dev/ptmx,/dev/null,' "$into"/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so.0.0.0
        printf '%s\n' "${version%%+*}" >"$into/version"
        ;;
    *) die "what is '$what'?" ;;
esac
