#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fuzzes the decoder of every function, and what stands between it and the driver: run.sh [SECONDS]; without an argument: the short form of
# the tests, 5 s from a fixed seed. Needs clang. What it finds lies in target/fuzz/accel/found.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
out=$target/fuzz/accel
# Files that kernels include are written below TMPDIR.
export TMPDIR="$out/scratch"
rm -rf "$TMPDIR"
mkdir -p "$out/found" "$out/new" "$TMPDIR"
"$root/fuzz/build" tombolo-accel-fuzz "$out/fuzz_calls"
fuzz() {
	"$out/fuzz_calls" -timeout=20 -max_len=512 -len_control=0 -close_fd_mask=3 -artifact_prefix="$out/found/" "$@" 2>"$out/log" || {
		cat "$out/log" >&2
		exit 1
	}
}
case ${1:-short} in
short)
	fresh=$(mktemp -d)
	trap 'rm -rf "$fresh"' EXIT
	fuzz -seed=1 -max_total_time=5 "$fresh"
	echo "1 passed, 0 failed"
	;;
*)
	fuzz -max_total_time="$1" -use_value_profile=1 -print_final_stats=1 "$out/new"
	tail -8 "$out/log"
	;;
esac
