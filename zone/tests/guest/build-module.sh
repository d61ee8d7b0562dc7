#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# build-module.sh KERNEL_RELEASE OUT_DIR [ordinary]: builds tmbtest.ko for a kernel; with 'ordinary', the one that must lose updates.
set -eu
release=$1 out=$2 kind=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
cp "$here/tmbtest.c" "$here/../../linux/doorbell.c" "$here/../../linux/doorbell.h" "$here/../../format/"*.h "$out/"
flags=-I$out
[ "$kind" != ordinary ] || flags="$flags -DTMB_TEST_ORDINARY_ATOMICS"
printf 'obj-m := tmbtest.o\ntmbtest-y := main.o doorbell.o\nccflags-y := %s -Wall -Werror\n' "$flags" >"$out/Kbuild"
mv "$out/tmbtest.c" "$out/main.c"
make -s -C "/lib/modules/$release/build" M="$out" modules
