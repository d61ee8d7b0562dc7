#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# build-image.sh KIT_DIR OUT.cpio MODULE.ko...: an initramfs with busybox, the modules of virtio-pmem and virtio-net, and the given ones.
# KIT_DIR holds modules/ of the kernel, as the guest kit lays it out.
set -eu
kit=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/modules" "$root/proc" "$root/sys" "$root/dev"
cp /bin/busybox "$root/bin/busybox"
cp "$here/init" "$root/init"
chmod 755 "$root/init"
n=10
for name in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci libnvdimm nd_virtio virtio_pmem failover net_failover virtio_net; do
	grep -q "/$name\.ko" "$kit/modules/modules.builtin" && continue
	file=$(find -L "$kit/modules/" -name "$name.ko*" | head -n 1)
	[ -n "$file" ] || { echo "build-image.sh: no module $name under $kit/modules" >&2; exit 1; }
	case $file in
	*.xz) xz -dc "$file" >"$root/modules/$n-$name.ko" ;;
	*.zst) zstd -dcq "$file" >"$root/modules/$n-$name.ko" ;;
	*) cp "$file" "$root/modules/$n-$name.ko" ;;
	esac
	n=$((n + 1))
done
# What uses semaphores in the guest.
gcc -O2 -Wall -Wextra -Werror -static -I"$here/../../format" -I"$here/../../sync" \
	"$here/synctest.c" "$here/../../sync/sync.c" -o "$root/bin/synctest"
for module; do cp "$module" "$root/"; done
(cd "$root" && find . | cpio --create --format=newc --quiet --owner=0:0) >"$out"
