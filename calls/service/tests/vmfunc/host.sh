#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Runs in the lab, with busybox' sh: host.sh FOLDER KERNEL PROGRAM. The folder has what the test gives it (main.rs).
set -eu
folder=$1 kernel=$2 program=$3
module=/sys/module/tombolo_service_host
say() { echo "host: $*"; }
# until_said WORDS: waits until the client's console has them, or the guest has ended.
until_said() {
    until grep -q "$1" /console; do
        kill -0 "$vm" || { cat /console; say "the guest ended before it said '$1'"; exit 1; }
        sleep 0.2
    done
}
exits() { sed -n 's/.*exit_reason: *\([0-9]*\).*hitcount: *\([0-9]*\).*/\1 \2/p' /sys/kernel/tracing/events/kvm/kvm_exit/hist | sort -n | sed "s/^/exits $1 /"; }

insmod "$folder/tombolo_service_host.ko" limit_us=200000
mount -t tracefs tracefs /sys/kernel/tracing
echo 'hist:keys=exit_reason' >/sys/kernel/tracing/events/kvm/kvm_exit/trigger

qemu-system-x86_64 -accel kvm -cpu host -m 256 -nodefaults -no-reboot -display none -serial file:/console -kernel "$kernel" \
    -initrd "$folder/guest.cpio" -append 'console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable mitigations=off' &
vm=$!
has_vcpu() { for fd in /proc/"$vm"/fd/*; do readlink "$fd" || :; done | grep -q kvm-vcpu; }
until has_vcpu && [ -e /console ]; do sleep 0.2; done
serve() { "$program" serve "$1" "$folder/$2.service" --vm $vm & }
serve kv kv
kv=$!
serve odd odd
odd=$!
serve last odd
last=$!

until_said 'counts begin'
exits before
until_said 'counts end'
exits after
until_said 'begins: the visit that its server dies in'
echo 60000000 >$module/parameters/limit_us
sleep 1
kill -9 $odd
until_said 'begins: the visit that its VM dies in'
sleep 1
kill -9 $vm
wait $vm || :
say 'the VM has died in a visit'
kill $kv $last
wait $kv || :
wait $last || :
rmmod tombolo_service_host
[ ! -e $module ]
say 'the module is gone'
cat /console
dmesg | grep -E 'BUG|WARNING|Oops' || say 'the kernel complains of nothing'
