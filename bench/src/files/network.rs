// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The network between the guests and the NFS server: a bridge with a TAP device for each VM, in a network namespace that ends with the
//! bench; or QEMU's user network, where the bench may not make these.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The server's address as guests see it.
pub const HOST: &str = "10.88.0.1";

/// A network for VMs, with a device for each.
pub struct Network {
    /// The address where a server must listen.
    pub listen: &'static str,
    /// What it is, for the results file.
    pub description: String,
    devices: Vec<(String, Vec<String>)>,
}

impl Network {
    /// The best that can be made here for the VMs.
    pub fn new(vms: &[&str]) -> Network {
        match bridge(vms) {
            Ok(()) => {
                // vhost-net saves a copy and QEMU's main loop.
                let vhost = if Path::new("/dev/vhost-net").exists() { "on" } else { "off" };
                let netdev =
                    |vm: &str| format!("tap,id=nfs,ifname={},script=no,downscript=no,vhost={vhost}", tap(vm));
                let description = format!("a bridge with TAP devices, vhost-net {vhost}");
                Network::with(vms, HOST, description, netdev)
            }
            Err(error) => {
                let description = format!("QEMU's user network (no bridge: {error:#})");
                let netdev = |_: &str| format!("user,id=nfs,net=10.88.0.0/24,host={HOST}");
                Network::with(vms, "127.0.0.1", description, netdev)
            }
        }
    }

    fn with(
        vms: &[&str],
        listen: &'static str,
        description: String,
        netdev: impl Fn(&str) -> String,
    ) -> Network {
        let device = |(at, vm): (usize, &&str)| {
            let mac = format!("52:54:00:88:00:{:02x}", at + 2);
            let arguments = [
                "-netdev".to_owned(),
                netdev(vm),
                "-device".into(),
                format!("virtio-net-pci,netdev=nfs,mac={mac},romfile="),
            ];
            ((*vm).to_owned(), arguments.to_vec())
        };
        Network { listen, description, devices: vms.iter().enumerate().map(device).collect() }
    }

    /// QEMU's arguments for a VM.
    pub fn qemu_args(&self, vm: &str) -> Vec<String> {
        let own = self.devices.iter().find(|(name, _)| name == vm);
        own.map(|(_, arguments)| arguments.clone()).unwrap_or_default()
    }

    /// The script that gives a VM its address.
    pub fn setup(&self, vm: &str) -> String {
        let at = self.devices.iter().position(|(name, _)| name == vm).unwrap_or(0);
        format!("ip link set eth0 up; ip addr replace 10.88.0.{}/24 dev eth0", at + 2)
    }
}

/// The name of a VM's TAP device.
fn tap(vm: &str) -> String {
    format!("nfs-{vm}")
}

/// Moves this thread, and so all that it starts from now on, into a network namespace with a bridge for the VMs.
fn bridge(vms: &[&str]) -> Result<()> {
    ensure!(Path::new("/dev/net/tun").exists(), "there is no /dev/net/tun");
    // SAFETY: a network namespace of its own takes nothing from this process's memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .context("a network namespace needs root")?;
    // If the rest fails, the user network needs the loopback device, and ganesha resolves no address where that has no other than 127.0.0.1.
    let mut script =
        String::from("ip link set lo up; ip addr add 10.88.1.1/32 dev lo; ip link add nfs type bridge; ");
    for vm in vms {
        let tap = tap(vm);
        script += &format!("ip tuntap add {tap} mode tap vnet_hdr; ip link set {tap} master nfs up; ");
    }
    script += &format!("ip addr add {HOST}/24 dev nfs; ip link set nfs up");
    let output = Command::new("sh").args(["-ec", &script]).output().context("can't run sh")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_has_a_device_an_address_and_a_mac_of_its_own() {
        let network =
            Network::with(&["bench", "other"], HOST, "test".into(), |vm| format!("tap,ifname={}", tap(vm)));
        let own = ["bench", "other"].map(|vm| (network.qemu_args(vm), network.setup(vm)));
        assert!(own[0].0[1].ends_with("nfs-bench") && own[1].0[1].ends_with("nfs-other"));
        assert!(
            own[0].0[3].contains("mac=52:54:00:88:00:02,") && own[1].0[3].contains("mac=52:54:00:88:00:03,")
        );
        assert!(own[0].1.contains("10.88.0.2/24") && own[1].1.contains("10.88.0.3/24"));
    }
}
