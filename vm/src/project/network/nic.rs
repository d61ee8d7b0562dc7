// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VM's device in a network, as QEMU and the guest get it.

use std::path::PathBuf;
use std::time::Duration;

use crate::compose::network::Lease;
use crate::guest::agent::Agent;
use crate::guest::exec;

/// A VM's device in a network.
#[derive(Clone, Debug)]
pub struct Nic {
    pub net: String,
    /// The socket of its port, to which QEMU connects.
    pub socket: PathBuf,
    pub lease: Lease,
    /// Queue pairs.
    pub queues: usize,
    /// Largest IP packet.
    pub mtu: u16,
    pub gateway: Option<std::net::Ipv4Addr>,
    /// The network's VMs that have an address, by name.
    pub names: Vec<(String, std::net::Ipv4Addr)>,
}

impl Nic {
    /// Sets the address of the guest's device through its agent, and tells the guest the names of the others.
    ///
    /// # Errors
    /// The guest has no such device, or refuses the address.
    pub fn set_address(&self, vm: &str, agent: &Agent) -> anyhow::Result<()> {
        const SET: &str = r##"for nic in /sys/class/net/*; do
	[ -e "$nic/device" ] && [ "$(cat "$nic/address")" = "$1" ] && break
	nic=
done
[ "$nic" ] || { uname -r; exit 3; }
nic=${nic##*/}
ip link set dev "$nic" mtu "$2" up || exit 1
case $3 in
	dhcp) [ ! -e /etc/udhcpc ] || udhcpc -n -q -t 10 -i "$nic" -s /etc/udhcpc || exit 1 ;;
	none) exit ;;
	*)
		ip -4 addr flush dev "$nic" && ip addr add "$3" brd + dev "$nic" || exit 1
		[ -z "$4" ] || ip route replace default via "$4" || exit 1 ;;
esac
[ $# -gt 5 ] || exit 0
net=$5 hosts=$(sed "/# tombolo $5\$/d" /etc/hosts)
shift 5
{ echo "$hosts"; for line; do echo "$line # tombolo $net"; done; } >/etc/hosts"##;
        let address = match self.lease.address {
            _ if self.lease.dhcp => "dhcp".to_owned(),
            Some((ip, prefix)) => format!("{ip}/{prefix}"),
            None => "none".to_owned(),
        };
        let mut args = vec![self.lease.mac.to_string(), self.mtu.to_string(), address];
        args.push(self.gateway.map(|g| g.to_string()).unwrap_or_default());
        args.push(self.net.clone());
        args.extend(self.names.iter().map(|(name, ip)| format!("{ip} {name} {name}.{}", self.net)));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = exec::script(agent, SET, &args, Duration::from_secs(60))?;
        match output.code {
            0 => Ok(()),
            3 => anyhow::bail!(
                "the VM '{}' sees no network device {}: its kernel {} may lack virtio_net",
                vm,
                self.lease.mac,
                output.out.trim()
            ),
            code => anyhow::bail!(
                "the VM '{}' can't set its address in the network '{}' (code {code}): {}",
                vm,
                self.net,
                output.err.trim()
            ),
        }
    }
}
