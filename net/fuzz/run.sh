#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fuzzes what reads frames, messages and rings of guests: run.sh [SECONDS [TARGET]...]; without an argument: the short form of the tests, each
# target for 5 s from a fixed seed. Needs clang. What a target finds lies in target/fuzz/net/TARGET/found.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
out=$target/fuzz/net
seconds=${1:-5}
if [ $# -gt 1 ]; then shift; else set -- "$@"; shift $#; set -- answers frames messages rings; fi
mkdir -p "$out"
"$root/fuzz/build" tombolo-net-fuzz "$out/fuzz_net"
for name; do
	mkdir -p "$out/$name/found" "$out/$name/new"
	TOMBOLO_FUZZ_TARGET=$name "$out/fuzz_net" -seed=1 -timeout=20 -max_len=2048 -max_total_time="$seconds" -print_final_stats=1 \
		-artifact_prefix="$out/$name/found/" "$out/$name/new" 2>"$out/$name/log" || {
		cat "$out/$name/log" >&2
		exit 1
	}
	echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$out/$name/log") inputs in $seconds s"
done
echo "$# passed, 0 failed"
