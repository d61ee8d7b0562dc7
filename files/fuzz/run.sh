#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fuzzes the file system's core: run.sh [SECONDS]; without an argument: the short form of the tests, from a fixed seed: all of the
# corpus and of regressions/, then 20 s. Needs clang. What it finds lies in target/fuzz/found.
# run.sh merge: what the last runs found new, joined with the corpus, as small as it gets.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${CARGO_TARGET_DIR:-$root/target}/fuzz
mkdir -p "$out/found" "$out/new"
clang -std=gnu11 -D_GNU_SOURCE -g -O1 -fno-omit-frame-pointer -fno-strict-aliasing -Wall -Wextra -Wno-unused-parameter -Werror \
	-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -include "$here/hooks.h" \
	-I"$root/files/core" -I"$root/zone/format" -o "$out/fuzz_core" "$here/fuzz_core.c" "$here/mutate.c" "$root"/files/core/*.c
fuzz() {
	"$out/fuzz_core" -timeout=20 -max_len=1024 -len_control=0 -artifact_prefix="$out/found/" -print_final_stats=1 "$@"
}
case ${1:-short} in
short)
	set -- "$here"/regressions/*
	"$out/fuzz_core" -timeout=20 "$@"
	fresh=$(mktemp -d)
	trap 'rm -rf "$fresh"' EXIT
	fuzz -seed=1 -max_total_time=20 "$fresh" "$here/corpus"
	echo "$(($# + 1)) passed, 0 failed"
	;;
merge)
	rm -rf "$out/merged"
	mkdir "$out/merged"
	fuzz -merge=1 "$out/merged" "$here/corpus" "$out/new"
	;;
*)
	fuzz -max_total_time="$1" -use_value_profile=1 "$out/new" "$here/corpus"
	;;
esac
