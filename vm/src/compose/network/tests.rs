// SPDX-License-Identifier: Apache-2.0 OR MIT
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

use super::*;
use crate::compose::Project;

fn parse(text: &str) -> Result<Project, String> {
    Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).map_err(|e| e.to_string())
}

fn plan(text: &str, net: &str) -> BTreeMap<String, Lease> {
    leases(&parse(text).unwrap().compose, "p", net, &BTreeMap::new()).unwrap()
}

const TWO: &str =
    "[net.lan]\n[vm.a]\nnetworks = [\"lan\"]\n[vm.b]\nnetworks = { lan = { mac = \"52:54:00:00:00:0b\" } }\n";

#[test]
fn addresses_come_by_convention_and_macs_from_names() {
    let plan = plan(TWO, "lan");
    assert_eq!(plan["a"].address, Some((Ipv4Addr::new(10, 86, 0, 2), 24)));
    assert_eq!(plan["b"].address, Some((Ipv4Addr::new(10, 86, 0, 3), 24)));
    assert_eq!(plan["b"].mac.to_string(), "52:54:00:00:00:0b");
    assert!(plan["a"].mac.to_string().starts_with("52:54:00:"));
    assert_ne!(plan["a"].mac, plan["b"].mac);
}

#[test]
fn a_vm_that_runs_keeps_its_address_when_others_come() {
    let before = plan(TWO, "lan");
    let text = format!(
        "{TWO}[vm.aa]\nnetworks = [\"lan\"]\n[vm.z]\nnetworks = {{ lan = {{ address = \"10.86.0.4\" }} }}\n"
    );
    let after = leases(&parse(&text).unwrap().compose, "p", "lan", &before).unwrap();
    assert_eq!((&after["a"], &after["b"]), (&before["a"], &before["b"]));
    assert_eq!(after["z"].address, Some((Ipv4Addr::new(10, 86, 0, 4), 24)));
    assert_eq!(after["aa"].address, Some((Ipv4Addr::new(10, 86, 0, 5), 24)));
}

#[test]
fn a_network_that_runs_keeps_its_subnet_when_another_comes_before_it() {
    let mut first = parse(TWO).unwrap().compose;
    settle(&mut first, &BTreeMap::new());
    let lan = first.net["lan"].subnet.unwrap();
    assert_eq!(lan.to_string(), "10.86.0.0/24");
    let mut second = parse(&format!("[net.alpha]\n[net.out]\nuplink = \"user\"\n{TWO}")).unwrap().compose;
    settle(&mut second, &BTreeMap::from([("lan".to_owned(), lan)]));
    assert_eq!(second.net["lan"].subnet, Some(lan));
    assert_eq!(second.net["alpha"].subnet.unwrap().to_string(), "10.86.1.0/24");
    assert_eq!(second.net["out"].subnet, None);
}

#[test]
fn an_uplink_leaves_addresses_to_whoever_is_there() {
    let text = |uplink: &str| format!("[net.out]\nuplink = {uplink}\n[vm.a]\nnetworks = [\"out\"]\n");
    let tap = &plan(&text("{ tap = \"tap0\" }"), "out")["a"];
    assert!(tap.address.is_none() && !tap.dhcp);
    let user = &plan(&text("\"user\""), "out")["a"];
    assert!(user.address.is_none() && user.dhcp);
}

#[test]
fn a_network_with_dhcp_gives_addresses_to_those_who_ask_and_needs_no_agent() {
    let text = "[net.lan]\ndhcp = true\n[vm.a]\nready = \"running\"\nnetworks = { lan = { address = \"dhcp\" } }\n\
                [vm.b]\nnetworks = [\"lan\"]\n";
    let plan = plan(text, "lan");
    assert_eq!((plan["a"].address, plan["a"].dhcp), (Some((Ipv4Addr::new(10, 86, 0, 2), 24)), true));
    assert_eq!((plan["b"].address, plan["b"].dhcp), (Some((Ipv4Addr::new(10, 86, 0, 3), 24)), false));
    let error = |text: &str| parse(text).unwrap_err();
    let e = error("[net.out]\nuplink = \"user\"\ndhcp = true\n[vm.a]\nnetworks = [\"out\"]\n");
    assert!(e.contains(":3: ") && e.contains("add subnet ="), "{e}");
    let e = error("[net.lan]\ndhcp = true\n[vm.a]\nnetworks = { lan = { address = \"10.86.0.1\" } }\n");
    assert!(e.contains("by which the network's DHCP goes"), "{e}");
    let e = error("[net.lan]\ndhcp = true\n[vm.a]\nnetworks = { lan = { vlan = 5 } }\n");
    assert!(e.contains("leave out vlan, or dhcp"), "{e}");
    let e = error("[net.lan]\nsubnet6 = \"fd00::/64\"\n[vm.a]\nnetworks = { lan = { vlan = 5 } }\n");
    assert!(e.contains("leave out vlan, or subnet6"), "{e}");
}

#[test]
fn a_network_with_an_ipv6_prefix_says_which_address_each_vm_makes() {
    let text = "[net.lan]\nsubnet6 = \"fd00:86::/64\"\nmulticast = \"query\"\n[vm.a]\n\
                networks = { lan = { mac = \"52:54:00:00:00:0b\", check_address = true, router = true } }\n";
    let lease = &plan(text, "lan")["a"];
    assert_eq!(lease.address6.unwrap().to_string(), "fd00:86::5054:ff:fe00:b");
    for text in ["fd00::/48", "fd00::1/64", "fe80::/64", "10.0.0.0/24"] {
        let e = parse(&format!("[net.lan]\nsubnet6 = \"{text}\"\n")).unwrap_err();
        assert!(e.contains("such as \"fd00:86::/64\""), "{e}");
    }
    let e = parse("[net.lan]\nsubnet6 = \"fd00::/64\"\nmtu = 1000\n").unwrap_err();
    assert!(e.contains("1280 or more"), "{e}");
}

#[test]
fn what_is_wrong_is_named_with_line_and_remedy() {
    let error = |text: &str| parse(text).unwrap_err();
    let e = error("[net.lan]\n[vm.a]\nnetworks = [\"lna\"]\n");
    assert!(e.contains(":3: ") && e.ends_with("did you mean 'lan'?"), "{e}");
    let e = error("[net.lan]\n[vm.a]\nnetworks = { lan = { mac = \"01:00:00:00:00:00\" } }\n");
    assert!(e.contains("is no unicast MAC"), "{e}");
    let mac = "networks = { lan = { mac = \"52:54:00:00:00:01\" } }";
    let e = error(&format!("[net.lan]\n[vm.a]\n{mac}\n[vm.b]\n{mac}\n"));
    assert!(e.contains(":5: vm.b and vm.a both have the MAC 52:54:00:00:00:01"), "{e}");
    let e = error("[net.lan]\nsubnet = \"10.0.0.1/24\"\n");
    assert!(e.contains(":2: ") && e.contains("write \"10.0.0.0/24\""), "{e}");
    let e = error("[net.lan]\nuplink = { bridge = \"br0\" }\n");
    assert!(e.contains("bridge") && e.contains("tap"), "{e}");
    let e = error(
        "[net.lan]\nsubnet = \"10.0.0.0/30\"\n[vm.a]\nnetworks = [\"lan\"]\n[vm.b]\nnetworks = [\"lan\"]\n",
    );
    assert!(e.contains("no address left for vm.b"), "{e}");
    let e = error("[net.lan]\n[vm.a]\nnetworks = { lan = { address = \"10.9.0.1\" } }\n");
    assert!(e.contains("which no VM can have in 10.86.0.0/24"), "{e}");
}

#[test]
fn further_macs_of_a_vm_are_nobody_elses_and_an_address_that_is_checked_is_known() {
    let text = |of_b: &str| {
        format!(
            "[net.lan]\n[net.out]\nuplink = \"user\"\n[vm.a]\n\
             networks = {{ lan = {{ macs = [\"52:54:00:00:00:0c\"], learn = 64 }} }}\n[vm.b]\nnetworks = {{ {of_b} }}\n"
        )
    };
    let nics = parse(&text("lan = {}")).unwrap().compose.vm["a"].networks.0["lan"].clone();
    assert_eq!((nics.macs[0].to_string(), nics.learn), ("52:54:00:00:00:0c".into(), 64));
    for (of_b, refused) in [
        ("lan = { mac = \"52:54:00:00:00:0c\" }", ":7: vm.b and vm.a both have the MAC 52:54:00:00:00:0c"),
        ("lan = { macs = [\"52:54:00:00:00:0c\"] }", ":7: vm.b and vm.a both have the MAC 52:54:00:00:00:0c"),
        ("lan = { macs = [\"01:00:00:00:00:00\"] }", "is no unicast MAC"),
        ("lan = { learn = 65 }", ":7: vm.b.networks.lan.learn: write 0 to 64"),
        (
            "lan = { address = \"none\", check_address = true }",
            ":7: vm.b.networks.lan.check_address: no address",
        ),
        ("out = { check_address = true }", ":7: vm.b.networks.out.check_address: no address"),
    ] {
        let e = parse(&text(of_b)).unwrap_err();
        assert!(e.contains(refused), "{of_b}: {e}");
    }
}

#[test]
fn a_vms_devices_survive_the_way_to_the_supervisor() {
    let p = parse("[net.lan]\n[vm.a]\nnetworks = { lan = { vlan = 5, isolated = true, check_address = true, queues = 2 } }\n").unwrap();
    let json = serde_json::to_string(&p).unwrap();
    assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), p);
}
