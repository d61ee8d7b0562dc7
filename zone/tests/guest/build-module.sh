#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# build-module.sh KERNEL_BUILD_DIR OUT_DIR [ordinary]: builds tmbtest.ko for a kernel; with 'ordinary', the one that loses updates.
set -eu
build=$1 out=$2 kind=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
cp "$here/../../linux/"*.[ch] "$here/../../linux/probe.sh" "$here/../../format/"*.h "$here/../../../files/linux/probes" "$out/"
cp "$here/tmbtest.c" "$out/main.c"
flags=-I$out
[ "$kind" != ordinary ] || flags="$flags -DTMB_TEST_ORDINARY_ATOMICS"
cat >"$out/Kbuild" <<END
obj-m := tmbtest.o
tmbtest-y := main.o doorbell.o syncdev.o
ccflags-y := $flags -Wall -Werror
ifneq (\$(shell sh $out/probe.sh $out \$(VERSION).\$(PATCHLEVEL) \$(CC) \$(NOSTDINC_FLAGS) \$(LINUXINCLUDE) \$(KBUILD_CPPFLAGS) \$(KBUILD_CFLAGS) && echo done),done)
\$(error the kernel's headers can't be asked what they have)
endif
END
make -s -C "$build" M="$out" modules
