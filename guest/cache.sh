# SPDX-License-Identifier: Apache-2.0 OR MIT
# shellcheck shell=bash
# Sourced with $root set to the checkout: makes the folder of everything that is fetched or built once, and sets $cache to its path, links resolved.
#
# It is $TOMBOLO_CACHE, or .cache in the checkout. The kernel's build system refuses paths with a space or a colon, so in such a checkout
# .cache becomes a link to a folder below ~/.cache/tombolo.

cache=${TOMBOLO_CACHE:-${root:?}/.cache}
if [[ $cache == *[[:space:]:]* && ! -e $cache ]]; then
    cache_target=${XDG_CACHE_HOME:-$HOME/.cache}/tombolo/checkout-$(printf '%s' "$cache" | cksum | cut -d' ' -f1)
    mkdir -p "$cache_target" "$(dirname "$cache")"
    ln -sfn "$cache_target" "$cache"
fi
mkdir -p "$cache"
cache=$(realpath "$cache")
if [[ $cache == *[[:space:]:]* ]]; then
    printf 'error: the cache folder %s has a space or a colon in its path, which the kernel build system refuses: set TOMBOLO_CACHE to another folder\n' "$cache" >&2
    exit 1
fi
