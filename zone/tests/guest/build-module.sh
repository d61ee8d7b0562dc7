#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# build-module.sh KERNEL_BUILD_DIR OUT_DIR [ordinary]: builds tmbtest.ko for a kernel; with 'ordinary', the one that loses updates.
set -eu
build=$1 out=$2 kind=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
cp "$here/../../linux/"*.[ch] "$here/../../format/"*.h "$out/"
cp "$here/tmbtest.c" "$out/main.c"
flags=-I$out
[ "$kind" != ordinary ] || flags="$flags -DTMB_TEST_ORDINARY_ATOMICS"
printf 'obj-m := tmbtest.o\ntmbtest-y := main.o doorbell.o syncdev.o\nccflags-y := %s -Wall -Werror\n' "$flags" >"$out/Kbuild"
make -s -C "$build" M="$out" modules
