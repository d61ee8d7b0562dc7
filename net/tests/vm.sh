#!/bin/bash
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Two stock guests on one switch: they ping each other and move data by TCP, with split and packed rings, with all
# offloads and with none on one side; the switch is killed and started again under load.
#
#   net/tests/vm.sh [path of the tombolo-switch or tombolo binary]
#
# Needs qemu-system-x86_64 (TOMBOLO_QEMU=program for another one; 7.2 is known to crash under TCG), busybox (static), iperf3, cargo and a kernel with its
# modules. TOMBOLO_TEST_HYPERVISOR=kvm where KVM works.
# ONLY=part of a title runs that case only. With BENCH=1 it prints what the guests measured.
set -euo pipefail

switch=("${1:-target/release/tombolo-switch}")
[[ ! ${NET_COMMAND:-} ]] || switch+=("$NET_COMMAND")
kernel=${KERNEL:-$(printf '%s\n' /boot/vmlinuz-* | sort -V | tail -n 1)}
release=${kernel#*/vmlinuz-}
tmp=$(mktemp -d)
pids=()
finish() {
  local pid
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || :; done
  wait
  rm -rf "$tmp"
}
trap finish EXIT

fail() { echo "FAILED: $*"; tail -n 30 "$tmp"/*.log; exit 1; }

cargo build --workspace --locked --quiet --bin tombolo-rig
rig=${CARGO_TARGET_DIR:-target}/debug/tombolo-rig
cat >"$tmp/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for m in $(cat /modules/order); do insmod /modules/$m.ko; done
for arg in $(cat /proc/cmdline); do case $arg in role=*) role=${arg#role=};; esac; done
ip link set lo up
ip link set eth0 mtu ${mtu:-1500} up
if [ $role = server ]; then
  ip addr add 10.0.0.1/24 dev eth0
  echo "SERVER READY"
  while :; do iperf3 -s >/dev/null 2>&1; done
fi
ip addr add 10.0.0.2/24 dev eth0
ping -c 60 -W 1 -w 60 10.0.0.1 -q -A -c 20 | sed 's/^/PING /'
tcp() { iperf3 -c 10.0.0.1 -t ${2:-4} -f m $1 2>&1 | awk -v w="$3" '/receiver|error/ {print "TCP", w, $0}'; }
tcp "" 4 send
tcp "-R" 4 receive
echo "KILL NOW"
tcp "" 12 restart
echo "CLIENT DONE"
poweroff -f
INIT
"$rig" image --release "$release" --module virtio_net --program "$(command -v iperf3)" --init "$tmp/init" --output "$tmp/initrd"

start_switch() {
  "${switch[@]}" run --control "$tmp/control" --port "a,$tmp/a,52:54:00:00:00:01" \
    --port "b,$tmp/b,52:54:00:00:00:02" >>"$tmp/switch.log" 2>&1 &
  switch_pid=$!
  pids+=("$switch_pid")
}

guest() { # name socket-name mac device-options role
  "$rig" boot --kernel "$kernel" --image "$tmp/initrd" --console "$tmp/$1.log" --shared-memory --processors 1 --append "role=$5" -- \
    -chardev "socket,id=c,path=$tmp/$2,reconnect=1" -netdev vhost-user,id=n,chardev=c \
    -device "virtio-net-pci,netdev=n,romfile=,mac=$3$4" </dev/null >"$tmp/$1.qemu" 2>&1 &
  pids+=($!)
  last=$!
}

wait_for() { # seconds file pattern
  for _ in $(seq "$1"); do grep -q "$3" "$2" && return 0; sleep 1; done
  fail "'$3' did not come within $1 s"
}

none=",csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,host_tso4=off,host_tso6=off,host_ecn=off,mrg_rxbuf=off"
run() { # title server-options client-options
  [[ $1 == *${ONLY:-}* ]] || return 0
  : >"$tmp/switch.log"
  start_switch
  guest server a 52:54:00:00:00:01 "$2" server; server=$last
  wait_for 120 "$tmp/server.log" "SERVER READY"
  guest client b 52:54:00:00:00:02 "$3" client; client=$last
  wait_for 180 "$tmp/client.log" "KILL NOW"
  sleep 3
  kill -9 "$switch_pid"
  wait "$switch_pid" 2>/dev/null || :
  start_switch
  wait_for 180 "$tmp/client.log" "CLIENT DONE"
  "${switch[@]}" --json ports --control "$tmp/control" >"$tmp/ports.json"
  grep -q 'PING .* 0% packet loss' "$tmp/client.log" || fail "$1: pings were lost"
  for what in send receive restart; do
    grep -q "TCP $what .*receiver" "$tmp/client.log" || fail "$1: TCP $what"
  done
  # Never collapse: even in emulation, tens of Mbit/s where a lost offload would give kilobits.
  awk '/TCP (send|receive)/ { for (i = 1; i < NF; i++) if ($(i+1) == "Mbits/sec" && $i < 20) exit 1 }' \
    "$tmp/client.log" || fail "$1: TCP collapsed"
  ! grep -q WARN "$tmp/switch.log" || fail "$1: the switch stopped a port"
  echo "ok: $1"
  [ -z "${BENCH:-}" ] || grep -hE "TCP|min/avg" "$tmp/client.log"
  kill "$client" "$server" "$switch_pid" 2>/dev/null || :
  wait "$client" "$server" "$switch_pid" 2>/dev/null || :
}

run "split rings, all offloads" "" ""
run "packed rings" ",packed=on" ",packed=on"
run "a sender with offloads, a receiver without" "$none" ""
run "mixed rings, a sender without offloads" ",packed=on" "$none"
