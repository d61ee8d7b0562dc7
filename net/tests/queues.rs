// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ports with several queues and a real QEMU (feature `vm-tests`; the guest kit must have been built; `$TOMBOLO_QEMU` is another QEMU): TCP
//! connections go on while the guests use more and fewer queues, get memory and lose it, are migrated, and reboot.

mod common;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::lab::Lab;
use common::{Rig, wait_for};
use serde_json::{Value, json};
use tombolo_net::control::socket::{Request, ask};
use tombolo_qemu::qmp::Qmp;
use tombolo_qemu::version::Qemu;
use tombolo_rig::guest::Guest;
use tombolo_rig::image::Image;
use tombolo_rig::kernel::Kernel;
use tombolo_rig::machine::Machine;

/// As `ethtool -L eth0 combined N`.
const CHANNELS: &str = r#"
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
int main(int count, char **words) {
	struct ethtool_channels channels = { .cmd = ETHTOOL_GCHANNELS };
	struct ifreq request = { .ifr_name = "eth0", .ifr_data = (char *)&channels };
	int any = socket(AF_INET, SOCK_DGRAM, 0);
	if (count != 2 || ioctl(any, SIOCETHTOOL, &request))
		return 1;
	channels.cmd = ETHTOOL_SCHANNELS;
	channels.combined_count = atoi(words[1]);
	return ioctl(any, SIOCETHTOOL, &request) != 0;
}
"#;
/// Four connections are taken, and each one's sum written when it has ended.
const RECEIVE: &str = "mkfifo /tmp/silence; for n in 1 2 3 4; do \
    (nc -l -p 500$n <>/tmp/silence | md5sum >/tmp/part$n; mv /tmp/part$n /tmp/sum$n) >/dev/null 2>&1 & done; \
    until [ $(netstat -ltn | grep -c :500) = 4 ]; do usleep 100000; done";
/// Four connections send until they are stopped.
const SEND: &str = "seq 1 100000 >/tmp/data; for n in 1 2 3 4; do mkfifo /tmp/copy$n; (md5sum </tmp/copy$n >/tmp/part$n; mv /tmp/part$n /tmp/sum$n) >/dev/null 2>&1 & \
    (while [ ! -e /tmp/stop ]; do cat /tmp/data; done | tee /tmp/copy$n | nc 10.0.0.1 500$n) >/dev/null 2>&1 & done";

/// A guest, and QEMU's monitor.
struct Vm {
    guest: Guest,
    qmp: Qmp,
    address: String,
}

impl Vm {
    fn start(lab: &Lab, n: usize, queues: u16, kernel: &Kernel, image: &Path) -> Vm {
        let file = |name: &str| lab.dir.path().join(format!("{name}{n}"));
        let monitor = file("monitor");
        let mut machine = Machine::new(&kernel.image, image, &file("console"));
        machine.shared_memory = true;
        machine.kernel_arguments = "memhp_default_state=online_movable".into();
        // Old QEMUs crash under TCG when a guest masks a vector of a vhost-user device.
        let old = Qemu::find(None).unwrap().version < (9, 0, 0);
        let vectors = if old { 0 } else { 2 * queues + 2 };
        let options = format!(
            "-m slots=1 -qmp unix:{},server=on,wait=off -action reboot=reset -chardev socket,id=c,path={} \
             -netdev vhost-user,id=n,chardev=c,queues={queues} -device virtio-net-pci,netdev=n,mq=on,vectors={vectors},romfile=,mac={}",
            monitor.display(),
            lab.socket(n).display(),
            Rig::mac(n)
        );
        machine.arguments = options.split_whitespace().map(Into::into).collect();
        let guest = Guest::start(&machine).unwrap();
        let qmp = Qmp::connect(UnixStream::connect(monitor).unwrap(), |_, _| ()).unwrap();
        let mut vm = Vm { guest, qmp, address: format!("10.0.0.{}", n + 1) };
        vm.configure();
        vm
    }

    fn configure(&mut self) {
        self.run(&format!("ip addr add {}/24 dev eth0 && ip link set eth0 up", self.address));
    }

    fn run(&mut self, command: &str) -> String {
        self.guest.run(command).unwrap()
    }

    fn ask(&self, command: &'static str, arguments: &Value) -> Value {
        self.qmp.execute_value(command, arguments).unwrap()
    }

    /// Gives the guest memory that it uses; `ADD_MEM_REG` at the switch.
    fn plug(&mut self) {
        let backend =
            json!({ "qom-type": "memory-backend-memfd", "id": "more", "size": 128 << 20, "share": true });
        self.ask("object-add", &backend);
        self.ask("device_add", &json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }));
        // 256 MiB at first, in blocks of 128 MiB.
        self.run("until [ $(cat /sys/devices/system/memory/memory*/state | grep -cx online) = 3 ]; do usleep 100000; done");
    }

    /// Takes the memory back; `REM_MEM_REG` at the switch.
    fn unplug(&self) {
        self.ask("device_del", &json!({ "id": "dimm" }));
        self.await_that("the memory back", |vm| vm.ask("query-memory-devices", &json!({})) == json!([]));
        self.ask("object-del", &json!({ "id": "more" }));
    }

    /// Saves the running guest, for which the switch logs the pages that it writes, and goes on here.
    fn migrate(&self) {
        self.ask("migrate-set-parameters", &json!({ "downtime-limit": 300_000 }));
        self.ask("migrate", &json!({ "uri": "exec:cat >/dev/null" }));
        self.await_that("the saved guest", |vm| {
            let status = vm.ask("query-migrate", &json!({}));
            assert_ne!(status["status"], "failed", "{status}");
            status["status"] == "completed"
        });
        self.ask("cont", &json!({}));
    }

    fn await_that(&self, what: &str, holds: impl Fn(&Vm) -> bool) {
        wait_for(what, || {
            std::thread::sleep(Duration::from_millis(50));
            holds(self).then_some(())
        });
    }
}

/// An image whose guests can set the number of their queues.
fn image(dir: &Path, kernel: &Kernel) -> PathBuf {
    let (source, program, image) = (dir.join("channels.c"), dir.join("channels"), dir.join("image"));
    std::fs::write(&source, CHANNELS).unwrap();
    assert!(Command::new("cc").args(["-static", "-o"]).args([&program, &source]).status().unwrap().success());
    let modules = ["virtio_pci", "virtio_net"].map(str::to_owned).to_vec();
    Image { modules, programs: vec![program], ..Image::default() }.write(kernel, &image).unwrap();
    image
}

/// Waits until more data has passed from guest 1 to guest 0.
fn flows(lab: &Lab) {
    let received = || {
        let (answer, _) = ask::<Value>(&lab.control(), &Request::Ports).unwrap();
        answer["ports"][1]["sent"]["bytes"].as_u64().unwrap()
    };
    let before = received();
    wait_for("more data", || {
        std::thread::sleep(Duration::from_millis(50));
        (received() > before + (2 << 20)).then_some(())
    });
}

fn connections_go_on(queues: u16) {
    let near = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(".cache");
    let cache = std::env::var_os("TOMBOLO_CACHE").map_or_else(near, PathBuf::from);
    let kernel = Kernel::of_kit(&cache.join("guest"), "6.12").unwrap();
    let lab =
        Lab::with(2, 2, |config, _| config.port.iter_mut().for_each(|port| port.queues = queues.into()));
    let image = image(lab.dir.path(), &kernel);
    let mut vms = [0, 1].map(|n| Vm::start(&lab, n, queues, &kernel, &image));
    vms[0].run(RECEIVE);
    vms[1].run(SEND);
    flows(&lab);
    for vm in &mut vms {
        for count in [queues, 1, queues - 1] {
            vm.run(&format!("channels {count}"));
            flows(&lab);
        }
        vm.plug();
        flows(&lab);
        vm.unplug();
        flows(&lab);
        vm.migrate();
        flows(&lab);
    }
    vms[1].run("touch /tmp/stop");
    const SUMS: &str =
        "until cat /tmp/sum1 /tmp/sum2 /tmp/sum3 /tmp/sum4 2>/dev/null; do usleep 100000; done | tail -n 4";
    assert_eq!(vms[0].run(SUMS), vms[1].run(SUMS));
    vms[0].guest.reboot().unwrap();
    vms[0].configure();
    vms[0].run(&format!("channels {queues}"));
    assert!(vms[1].run("ping -c 5 -A -W 10 10.0.0.1").contains(" 0% packet loss"));
}

#[test]
fn connections_over_two_queues_go_on_whatever_the_guests_do() {
    connections_go_on(2);
}

#[test]
fn connections_over_four_queues_go_on_whatever_the_guests_do() {
    connections_go_on(4);
}
