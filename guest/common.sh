# SPDX-License-Identifier: Apache-2.0 OR MIT
# shellcheck shell=bash
# Sourced by the guest kit's scripts: where things are, messages, and an apt of our own. That apt resolves and downloads Debian
# packages into the cache without root and without looking at what this machine has installed; the mirrors are the
# machine's own.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
# shellcheck source=cache.sh
. "$here/cache.sh"
kit=$cache/guest
export LC_ALL=C SOURCE_DATE_EPOCH=1700000000

trap 'printf "guest: error: %s:%s: %s failed\n" "${BASH_SOURCE[0]}" "$LINENO" "$BASH_COMMAND" >&2' ERR

say() { printf 'guest: %s\n' "$*" >&2; }
die() { printf 'guest: error: %s\n' "$*" >&2; exit 1; }

# The words of a list file: one item per line, # opens a comment.
list() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$@"; }

# Debian's code name of this machine: the guests' programs come from the same release, so that what is built here runs there.
codename() {
    local name
    name=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    case $name in
        bookworm | trixie) printf '%s' "$name" ;;
        *) die "the guest kit is built on Debian 12 (bookworm) or 13 (trixie); this is '${name:-unknown}' (/etc/os-release)" ;;
    esac
}

# The base address of the archive of suite $1, as this machine's apt has it.
archive_of() {
    apt-get indextargets --no-release-info --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v suite="$1" '$1 == suite && $2 == "main" && !uri { uri = $3 } END { print uri }'
}

# Runs an apt tool ($1) with a state, a cache and sources of our own.
kit_apt() {
    local tool=$1 apt=$kit/apt
    shift
    "$tool" -o Dir::State="$apt/state" -o Dir::State::status="$apt/state/status" -o Dir::Cache="$apt/cache" \
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts="$apt/none" -o Dir::Etc::preferences=/dev/null \
        -o Dir::Etc::preferencesparts="$apt/none" -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o APT::Sandbox::User= \
        -o Acquire::Languages=none -o Acquire::Retries=3 -q=2 "$@"
}

# Makes that apt ready: sources of this machine's release plus the one that has the other kernel, or of release $kit_release alone where that is set (with its backports: kit_backports).
kit_apt_ready() {
    local name main security suites suite apt=$kit/apt keyring=/usr/share/keyrings/debian-archive-keyring.gpg options=''
    name=$(codename)
    main=$(archive_of "$name")
    security=$(archive_of "$name-security")
    [[ $main ]] || die "apt on this machine has no source for '$name main'; add one to /etc/apt/sources.list.d"
    [[ ! -e $keyring ]] || options="[signed-by=$keyring] "
    mkdir -p "$apt/none" "$apt/state/lists/partial" "$apt/cache/archives/partial"
    : >"$apt/state/status"
    case $name in
        bookworm) suites=(bookworm bookworm-updates bookworm-backports) ;;
        trixie) suites=(trixie trixie-updates bookworm) ;;
    esac
    [[ ! ${kit_release:-} ]] || suites=("$kit_release" "$kit_release-updates" ${kit_backports:+"$kit_release-backports"})
    for suite in "${suites[@]}"; do printf 'deb %s%s %s main\n' "$options" "$main" "$suite"; done >"$apt/sources.new"
    if [[ $security ]]; then
        for suite in "${suites[@]}"; do
            [[ $suite == *-* ]] || printf 'deb %s%s %s-security main\n' "$options" "$security" "$suite"
        done >>"$apt/sources.new"
    fi
    # Fetched once a day at most: `make guest` on a built kit doesn't come here at all.
    if ! cmp -s "$apt/sources.new" "$apt/sources.list" || [[ ! $(find "$apt/updated" -mmin -1440 2>/dev/null) ]]; then
        # A run that is interrupted here begins with the lists again.
        rm -f "$apt/updated"
        mv "$apt/sources.new" "$apt/sources.list"
        say 'fetching package lists'
        kit_apt apt-get update --error-on=any >&2 || die 'apt-get update failed: is the network up, does the mirror carry these suites?'
        touch "$apt/updated"
    fi
}

# Downloads packages ($2… as NAME or NAME=VERSION) and unpacks them into the folder $1.
unpack_packages() {
    local into=$1 deb debs dir
    shift
    debs=$(mktemp -d "$kit/debs.XXXXXX")
    (cd "$debs" && kit_apt apt-get download "$@" >&2) || die "apt could not download: $*"
    # Merged /usr, whatever the packages of this release carry.
    mkdir -p "$into"/usr/{bin,sbin,lib,lib64}
    for dir in bin sbin lib lib64; do ln -sfn "usr/$dir" "$into/$dir"; done
    for deb in "$debs"/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$into" --keep-directory-symlink --no-same-owner; done
    rm -rf "$debs"
}

# Every package that the packages $@ need, themselves included, as NAME=VERSION.
closure_of() {
    kit_apt apt-get install --simulate --no-install-recommends "$@" | awk '$1 == "Inst" { sub(/^[([]/, "", $3); print $2 "=" $3 }'
}

# A folder as a cpio archive that is equal for equal content.
pack() {
    local from=$1 to=$2
    find "$from" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    (cd "$from" && find . -mindepth 1 -print0 | sort -z | cpio --null --create --format=newc --reproducible --owner=0:0 --quiet) >"$to.new"
    mv "$to.new" "$to"
}
