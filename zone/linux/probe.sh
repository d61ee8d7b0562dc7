#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
# probe.sh FOLDER VERSION COMPILER FLAGS...: asks a kernel's headers what they have. Kbuild calls it before it compiles a module.
#
# A line 'NAME | HEADER | CODE' of FOLDER/probes becomes '#define NAME 1' in FOLDER/probed.h if CODE compiles after <linux/fs.h> and <linux/HEADER>, else '#define NAME 0'.
# Versions can't tell, since stable kernels and distributions take over changes of newer ones. VERSION is the kernel's: one that is newer than the
# newest tested, which a line 'tested VERSION' of FOLDER/probes names, gets a warning.
set -eu
folder=$1 version=$2
shift 2
exec </dev/null
stamp="/* $(printf '%s\n' "$version" "$@" | cat - "$folder/probes" | cksum) */"
if [ -e "$folder/probed.h" ] && [ "$(head -n 1 "$folder/probed.h")" = "$stamp" ]; then exit 0; fi

compiles() {
    printf '#include <linux/fs.h>\n#include <linux/%s>\n%s\n' "$header" "$code" >"$folder/probe-$name.c"
    "$@" -DMODULE -std=gnu11 -Wno-error -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
        -fsyntax-only -x c "$folder/probe-$name.c"
}

# A compiler that compiles nothing would answer every question with no.
name=none header=fs.h code='int tmb_nothing;'
compiles "$@" || { echo "probe.sh: $1 can't compile against this kernel's headers" >&2; exit 1; }

trap 'rm -f "$folder"/probe-*.c "$folder"/probe-*.is "$folder/probed.new"' EXIT
running=0
while IFS='|' read -r name header code; do
    case $name in '' | '#'* | tested*) continue ;; esac
    name=${name% } header=${header# }
    header=${header% }
    (if compiles "$@" 2>/dev/null; then echo "#define $name 1"; else echo "#define $name 0"; fi >"$folder/probe-$name.is") &
    running=$((running + 1))
    [ $((running % 4)) -ne 0 ] || wait
done <"$folder/probes"
wait
{ echo "$stamp"; cat "$folder"/probe-*.is; } >"$folder/probed.new"
mv "$folder/probed.new" "$folder/probed.h"

newest=$(sed -n 's/^tested //p' "$folder/probes")
if [ "$(printf '%s\n' "$newest" "$version" | sort -V | tail -n 1)" != "$newest" ]; then
    echo "warning: this kernel, $version, is newer than $newest, the newest that this module was tested with" >&2
fi
