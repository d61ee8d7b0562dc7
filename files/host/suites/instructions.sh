#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Instructions of the core's operations, each kind run as often as instructions.c says; no load of the machine changes them: instructions.sh [CHECKOUT].
# With a second checkout of this repository the table has its numbers first, and the difference. Needs valgrind. Copies of data count for less than
# they cost.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count() { # of the checkout $1, into $2
	numbers=
	grep -q '^struct tfs_handle' "$1/files/core/tfs.h" || numbers=-DNUMBERS
	# shellcheck disable=SC2086
	cc $numbers -O2 -g -std=gnu11 -fno-strict-aliasing -I"$1/files/core" -I"$1/zone/format" -I"$1/files/host/os" "$here/instructions.c" \
		"$1"/files/core/*.c "$1"/files/host/os/*.c -o "$work/program"
	valgrind --quiet --tool=callgrind --callgrind-out-file="$work/profile" "$work/program"
	callgrind_annotate --inclusive=yes --threshold=100 "$work/profile" | grep -v '=>' |
		sed -n 's/^ *\([0-9,]*\) .*:\(op_[a-z0-9_]*\) .*/\2 \1/p' | tr -d , | sort >"$2"
}
count "$here/../../.." "$work/here"
if [ $# = 0 ]; then
	cat "$work/here"
	exit
fi
count "$1" "$work/there"
join "$work/there" "$work/here" | awk '{ printf "%-18s %11d %11d %+7.1f %%\n", $1, $2, $3, ($3 - $2) * 100 / $2 }'
