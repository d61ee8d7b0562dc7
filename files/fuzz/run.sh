#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Fuzzes the file system's core: run.sh [SECONDS]. Needs clang. What it finds lies in target/fuzz afterwards.
set -eu
seconds=${1:-20}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$root/target/fuzz
mkdir -p "$out/found"
clang -std=gnu11 -g -O1 -fno-omit-frame-pointer -fno-strict-aliasing \
	-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
	-I"$root/files/core" -I"$root/zone/format" -o "$out/fuzz_core" "$here/fuzz_core.c" "$root"/files/core/*.c
exec "$out/fuzz_core" -max_total_time="$seconds" -timeout=20 -max_len=1024 -len_control=0 -use_value_profile=1 -print_final_stats=1 \
	-artifact_prefix="$out/found/" "$out/found" "$here/corpus"
