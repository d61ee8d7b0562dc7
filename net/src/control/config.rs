// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The switch's configuration: the types of [`tombolo_control::net::config`] with the switch's rules, and their checks.

pub use tombolo_control::net::config::{Multicast, SwitchConfig, UplinkConfig, Way};

use tombolo_control::net::config::{self, QUEUES_MAX};

use crate::forwarding::learn::MAX_LEARNED;
use crate::policy::port::{Policy, Vlan};
use crate::policy::rules::Rule;

/// A switch's configuration file.
pub type Config = config::Config<Rule>;
/// A guest's port.
pub type PortConfig = config::PortConfig<Rule>;

impl From<&PortConfig> for Policy {
    fn from(config: &PortConfig) -> Self {
        Policy {
            macs: config.macs.clone(),
            check_mac: config.check_mac,
            learn: config.learn,
            ips: config.ips.clone(),
            router: config.router,
            no_server: false,
            isolated: config.isolated,
            uplink: false,
            only: None,
            vlan: config.vlan.clone(),
            mirror: config.mirror.as_deref().map(str::to_owned),
            rate: config.rate,
            receive_rate: config.receive_rate,
            rules: config.rules.to_vec(),
            mtu: config.mtu,
        }
    }
}

impl From<&UplinkConfig> for Policy {
    fn from(config: &UplinkConfig) -> Self {
        let (only, vlan) = (config.port.clone(), config.vlan.clone());
        Policy { uplink: true, only, vlan, ..Policy::default() }
    }
}

/// Checks the settings of a port.
///
/// # Errors
/// Names the wrong setting and the remedy.
pub fn check_port(config: &PortConfig) -> anyhow::Result<()> {
    let name = &config.name;
    check_name("port", name)?;
    anyhow::ensure!(!config.macs.is_empty(), "port {name} owns no MAC; give it one in 'macs'");
    anyhow::ensure!(
        (1..=QUEUES_MAX).contains(&config.queues),
        "port {name} has {} queues; from 1 to {QUEUES_MAX} are possible",
        config.queues
    );
    anyhow::ensure!(
        usize::from(config.learn) <= MAX_LEARNED,
        "port {name} may learn {} addresses; up to {MAX_LEARNED} are possible",
        config.learn
    );
    check_vlan(name, &config.vlan)
}

/// Checks the settings of an uplink.
///
/// # Errors
/// Names the wrong setting and the remedy.
pub fn check_uplink(config: &UplinkConfig) -> anyhow::Result<()> {
    check_name("uplink", &config.name)?;
    check_vlan(&config.name, &config.vlan)
}

/// Most bytes of a name.
const NAME_MAX: usize = 64;

fn check_name(kind: &str, name: &str) -> anyhow::Result<()> {
    anyhow::ensure!(!name.is_empty(), "the {kind} has no name; give it one");
    let plain = name.len() <= NAME_MAX && !name.chars().any(char::is_control);
    anyhow::ensure!(plain, "{kind} {name:?}: a name has up to {NAME_MAX} bytes and no control characters");
    Ok(())
}

fn check_vlan(name: &str, vlan: &Vlan) -> anyhow::Result<()> {
    let all = if *vlan == Vlan::Transparent { vec![] } else { vlan.numbers() };
    for v in all {
        anyhow::ensure!((1..4095).contains(&v), "port {name}: VLAN {v} is not possible; use 1 to 4094");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::endpoint::Role;

    #[test]
    fn a_whole_configuration_is_read() {
        let text = r#"
            [switch]
            workers = 2
            poll-us = 0
            budget = 150
            control = "/run/tombolo/net.sock"
            metrics = "127.0.0.1:9127"
            [[port]]
            name = "web"
            socket = "/run/tombolo/web.sock"
            macs = ["52:54:00:00:00:01", "52:54:00:00:00:02"]
            ips = ["10.0.0.1", "fd00::1"]
            vlan = { access = 5 }
            rate = { bytes = 1000000 }
            receive-rate = { packets = 100000 }
            rules = [{ action = "drop", direction = "out", protocol = "tcp", destination-port = 25 }]
            [[port]]
            name = "db"
            socket = "/run/tombolo/db.sock"
            role = "client"
            macs = ["52:54:00:00:00:03"]
            vlan = { trunk = { vlans = [5, 6], native = 7 } }
            isolated = true
            [[uplink]]
            name = "out"
            tap = "tap0"
            [[uplink]]
            name = "user"
            passt = "/tmp/passt.sock"
        "#;
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.port[0].vlan, Vlan::Access(5));
        assert!(config.port[0].check_mac && config.port[0].offload);
        assert_eq!(Policy::from(&config.port[0]).rules[0].to_string(), "drop out tcp to port 25");
        assert_eq!(config.port[1].role, Role::Client);
        assert_eq!(config.uplink[0].way, Way::Tap("tap0".into()));
        assert_eq!(config.uplink[1].way, Way::Passt("/tmp/passt.sock".into()));
        config.port.iter().for_each(|p| check_port(p).unwrap());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_name_and_a_remedy() {
        let port = |extra: &str| {
            toml::from_str::<PortConfig>(&format!("name='a'\nsocket='/s'\n{extra}"))
                .map_err(|e| e.to_string())
                .and_then(|p| check_port(&p).map_err(|e| e.to_string()))
                .unwrap_err()
        };
        assert!(port("macs=[]").contains("owns no MAC"));
        assert!(port("macs=['52:54:00:00:00:01']\nqueues=0").contains("from 1 to"));
        assert!(port("macs=['52:54:00:00:00:01']\nvlan={access=4095}").contains("1 to 4094"));
        assert!(port("macs=['52:54:00:00:00:01']\nlearn=65").contains("up to 64"));
        assert!(port("macs=['ff:ff:ff:ff:ff:ff']").contains("unicast"));
        assert!(port("macs=['52:54:00:00:00:01']\ncolour='red'").contains("colour"));
        for name in ["a\0", "a\nb", "\x1b[2J", &"x".repeat(65)] {
            let config = serde_json::json!({ "name": name, "socket": "/s", "macs": ["52:54:00:00:00:01"] });
            let port = serde_json::from_value::<PortConfig>(config).unwrap();
            let err = check_port(&port).unwrap_err().to_string();
            assert!(err.contains("no control characters"), "{err}");
        }
    }
}
