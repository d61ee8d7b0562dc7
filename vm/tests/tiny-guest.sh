#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# tiny-guest.sh OUT [VERSION [ROOT]]: the smallest guest that the tests of this part need: OUT/vmlinuz and OUT/initrd.img
# from the installed Debian kernel VERSION (default: the newest with a /boot/vmlinuz), busybox-static and
# qemu-guest-agent. ROOT is where the kernel package lies unpacked, if it is not installed.
set -euo pipefail
out=$1
root=${3:-}
version=${2:-$(ls "$root"/boot/ | sed -n 's/^vmlinuz-//p' | sort -V | tail -1)}
modules=(virtio_pci virtio_console virtio_pmem nd_pmem virtio_blk virtio_mem)

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/{bin,dev,proc,sys,run,tmp,etc,root,mnt,lib/modules,var/log}
cp /bin/busybox "$tree/bin/busybox"
for applet in $("$tree/bin/busybox" --list); do
	[ "$applet" = busybox ] || ln -sf busybox "$tree/bin/$applet"
done
ln -s bin "$tree/sbin"
mkdir -p "$tree/usr"
ln -s ../bin "$tree/usr/bin"
ln -s ../bin "$tree/usr/sbin"

agent=$(command -v qemu-ga || echo /usr/sbin/qemu-ga)
cp "$agent" "$tree/bin/qemu-ga"
ldd "$agent" | grep -o '/[^ ]*' | while read -r lib; do
	mkdir -p "$tree$(dirname "$lib")"
	cp -L "$lib" "$tree$lib"
done

n=0
for module in "${modules[@]}"; do
	modprobe -d "${root:-/}" -S "$version" --show-depends "$module" | while read -r kind file _; do
		[ "$kind" = insmod ] || continue
		name=$(basename "$file" .xz)
		ls "$tree"/lib/modules/*-"$name" >/dev/null 2>&1 && continue
		n=$(find "$tree/lib/modules" -type f | wc -l)
		case $file in
		*.xz) xz -dc "$file" ;;
		*) cat "$file" ;;
		esac >"$(printf '%s/lib/modules/%03d-%s' "$tree" "$n" "$name")"
	done
done

cat >"$tree/init" <<'INIT'
#!/bin/sh
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
for m in /lib/modules/*.ko; do insmod "$m"; done
mkdir -p /dev/virtio-ports
# A port's name arrives in a control message after the driver has bound: wait for it, two seconds at most.
agent=/dev/virtio-ports/org.qemu.guest_agent.0
tries=0
while [ ! -e $agent ] && [ $tries -lt 200 ]; do
	for p in /sys/class/virtio-ports/*; do
		[ -e "$p/name" ] && ln -sf "/dev/${p##*/}" "/dev/virtio-ports/$(cat "$p/name")"
	done
	[ -e $agent ] || usleep 10000
	tries=$((tries + 1))
done
case "$(cat /proc/cmdline)" in
*test.fail*) echo "tiny guest: told to fail"; echo "tiny guest: last words"; poweroff -f ;;
*test.noagent*) ;;
*) qemu-ga -m virtio-serial -p $agent -d -t /run -f /run/qga.pid -l /run/qga.log ;;
esac
echo "tiny guest: ready"
export HOME=/root PATH=/bin
while :; do setsid -c sh -l </dev/ttyS0 >/dev/ttyS0 2>&1; done
INIT
chmod +x "$tree/init"

mkdir -p "$out"
cp "$root/boot/vmlinuz-$version" "$out/vmlinuz.new"
(cd "$tree" && find . | cpio -o -H newc -R 0:0 --quiet | gzip -1) >"$out/initrd.new"
mv "$out/vmlinuz.new" "$out/vmlinuz"
mv "$out/initrd.new" "$out/initrd.img"
