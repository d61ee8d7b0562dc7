#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# pjdfstest and fsx over the FUSE mount: run.sh [short|full|build]. Short: all of pjdfstest, 10,000 operations of fsx; full: 1,000,000.
# Needs root and /dev/fuse. The suites are built once, into target/tools; build: no more than that.
set -eu
case ${1:-short} in
short) operations=10000 ;;
full) operations=1000000 ;;
build) operations='' ;;
*) echo "usage: $0 [short|full|build]" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
tools=$root/target/tools
cd "$root"
for suite in pjdfstest@0.2.2 fsx@0.3.2; do
	[ -x "$tools/bin/${suite%@*}" ] || cargo install --quiet --locked --root "$tools" --target-dir "$tools/build" "$suite"
done
[ "$operations" ] || exit 0
cargo build --workspace --locked --quiet --bins
files() { "$root/target/debug/tombolo-files-torture" files "$@"; }
# In memory: every fsync would wait for a disk.
work=$(mktemp -d /dev/shm/tombolo-suites.XXXXXX)
chmod 755 "$work" # other users, whom the suites become, must get in
cleanup() {
	cd "$root"
	if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
	rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
mkdir "$work/mnt" "$work/second"
files mkfs --size 256M "$work/zone"
files mount "$work/zone" "$work/mnt"
mkdir "$work/mnt/pjd"
"$tools/bin/pjdfstest" -c "$here/pjdfstest.toml" -p "$work/mnt/pjd" -s "$work/second" >"$work/log" 2>&1 || {
	grep -A3 FAILED "$work/log"
	exit 1
}
grep ^Summary "$work/log"
passed=$(sed -n 's/.*[^0-9]\([0-9][0-9]*\) passed.*/\1/p' "$work/log" | tail -n 1)
"$tools/bin/fsx" -q -f "$here/fsx.toml" -S "${FSX_SEED:-1}" -N "$operations" -P "$work" "$work/mnt/fsx"
umount "$work/mnt"
# The mount's process leaves the zone after the kernel has let go of it: wait for its lock.
flock "$work/zone" true
files fsck -n "$work/zone"
# pjdfstest's own count, and one each for fsx and fsck, which got here only by passing.
echo "$((passed + 2)) passed, 0 failed"
