// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks of a compose file, with real guests as a user has them. Under TCG, with the guest kit's 6.1 kernel.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, signal};
use serde_json::Value;

mod common;

const TWO: &str = r#"
[net.lan]
[vm.a]
kernel = "6.1"
memory = "256M"
networks = { lan = { queues = 2 } }
[vm.b]
kernel = "6.1"
memory = "256M"
networks = { lan = { address = "10.86.0.9", mac = "52:54:00:00:00:0b", queues = 4 } }
"#;

fn json(lab: &Lab, args: &[&str]) -> Value {
    serde_json::from_str(&lab.good(args)).unwrap()
}

fn ping(lab: &Lab) {
    let said = lab.good(&["exec", "a", "--", "ping", "-c", "5", "-A", "-W", "10", "b"]);
    assert!(said.contains("PING b (10.86.0.9)") && said.contains(" 0% packet loss"), "{said}");
}

/// The sum of the bytes that `times` times the same file are, so that both ends can be asked for it.
fn sum(lab: &Lab, times: u32) -> String {
    lab.good(&[
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        &format!("for i in $(seq {times}); do cat /tmp/data; done | md5sum"),
    ])
}

/// Sends the file so many times over one connection from a to b; the child's output is the sum of what arrived.
fn transfer(lab: &Lab, times: u32) -> (Child, Child) {
    // With an end of its input nc would close its half of the connection, and the other nc then gives up.
    lab.good(&["exec", "b", "--", "sh", "-c", "[ -e /tmp/silence ] || mkfifo /tmp/silence"]);
    let receive = lab
        .command(&["exec", "b", "--", "sh", "-c", "nc -l -p 5000 <>/tmp/silence | md5sum"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Until the other listens, a connection is refused before anything is sent.
    let text = format!(
        "for i in $(seq 600); do (for i in $(seq {times}); do cat /tmp/data; done) | nc b 5000 && exit; usleep 100000; done; exit 1"
    );
    let send = lab.command(&["exec", "a", "--", "sh", "-c", &text]).spawn().unwrap();
    (send, receive)
}

fn arrived((mut send, receive): (Child, Child)) -> String {
    assert!(send.wait().unwrap().success());
    String::from_utf8(receive.wait_with_output().unwrap().stdout).unwrap()
}

/// Bytes and frames that a has sent.
fn sent(lab: &Lab) -> (u64, u64) {
    let ports = json(lab, &["net", "ports", "--json"]);
    let sent = &ports["ports"][0]["sent"];
    (sent["bytes"].as_u64().unwrap(), sent["packets"].as_u64().unwrap())
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "{what} never came");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn vms_of_a_network_reach_each_other_and_go_on_when_a_vm_or_the_switch_is_killed() {
    let lab = Lab::new(TWO);
    lab.good(&["up"]);
    let net = &json(&lab, &["net", "ls", "--json"])[0];
    assert_eq!(
        (&net["name"], &net["subnet"], &net["starts"]),
        (&"lan".into(), &"10.86.0.0/24".into(), &1.into())
    );
    let ports = net["ports"].as_array().unwrap();
    assert_eq!(
        (&ports[0]["address"], &ports[1]["address"]),
        (&"10.86.0.2/24".into(), &"10.86.0.9/24".into())
    );
    assert_eq!(ports[1]["mac"], "52:54:00:00:00:0b");
    let text = lab.good(&["ps"]);
    assert!(text.contains("52:54:00:00:00:0b  10.86.0.9/24") && !text.contains("(down)"), "{text}");
    ping(&lab);

    // Data arrives as it was sent, and in segments larger than any frame on a wire.
    lab.good(&["exec", "a", "--", "sh", "-c", "seq 1 100000 >/tmp/data"]);
    let (bytes, frames) = sent(&lab);
    assert_eq!(arrived(transfer(&lab, 10)), sum(&lab, 10));
    let (bytes, frames) = (sent(&lab).0 - bytes, sent(&lab).1 - frames);
    assert!(
        bytes > 4 << 20 && bytes / frames > 3000,
        "{bytes} bytes in {frames} frames: no segmentation offload"
    );

    // The switch is killed in the middle of a connection, which goes on.
    let before = sent(&lab).0;
    let running = transfer(&lab, 60);
    wait_until("a part of the data", || sent(&lab).0 > before + (4 << 20));
    signal(u32::try_from(net["pid"].as_u64().unwrap()).unwrap(), "KILL");
    wait_until("another switch", || json(&lab, &["net", "ls", "--json"])[0]["starts"] == 2);
    assert_eq!(arrived(running), sum(&lab, 60));
    let ports = json(&lab, &["net", "ports", "--json"]);
    assert!(ports["ports"].as_array().unwrap().iter().all(|p| p["up"] == true), "{ports}");
    assert!(sent(&lab).0 > 1 << 20, "nothing went through the second switch");

    // The traffic is shown per second, by port and VM.
    let mut pings = lab.command(&["exec", "a", "--", "ping", "-A", "-q", "b"]).spawn().unwrap();
    wait_until("rates", || {
        let said = json(&lab, &["top", "-f", "tombolo.toml", "--json", "--count", "1", "--interval", "0.5"]);
        let switch = &said["switches"][0];
        assert!(switch["name"].as_str().unwrap().ends_with("/lan"), "{said}");
        let (port, vm) = (&switch["ports"][0], &said["vms"][0]);
        assert_eq!((&port["name"], &port["state"], &vm["name"]), (&"a".into(), &"up".into(), &"a".into()));
        port["sent"]["bits_per_s"].as_f64().unwrap() > 0.0 && vm["cpu_percent"].as_f64().unwrap() > 0.0
    });
    pings.kill().unwrap();
    pings.wait().unwrap();
    let text = lab.good(&["top", "-f", "tombolo.toml", "--count", "1"]);
    assert!(text.contains("SENT/S") && text.contains("MEMORY"), "{text}");

    // A VM whose driver lets the card go is down, and no other is.
    lab.good(&[
        "exec",
        "b",
        "--",
        "sh",
        "-c",
        "cd /sys/bus/virtio/drivers/virtio_net && ls -d virtio* >/tmp/card && cat /tmp/card >unbind",
    ]);
    let ups = || {
        let net = json(&lab, &["net", "ls", "--json"])[0].clone();
        net["ports"].as_array().unwrap().iter().map(|port| port["up"] == true).collect::<Vec<_>>()
    };
    wait_until("b without its card", || ups() == [true, false]);
    for command in [&["net", "ls"][..], &["ps"]] {
        let text = lab.good(command);
        assert!(text.contains("  b (down)  ") && !text.contains("a (down)"), "{text}");
    }

    // A VM is killed and comes back with the same address.
    let pid = lab.ps()["vms"][1]["pid"].as_u64().unwrap();
    signal(u32::try_from(pid).unwrap(), "KILL");
    wait_until("the VM's end", || lab.ps()["vms"][1]["state"] != "up");
    lab.good(&["up"]);
    ping(&lab);

    lab.good(&["down"]);
    lab.assert_nothing_left();
}

/// QEMU with a card that is connected to nothing.
const UNPLUGGED: &str = r#"#!/bin/bash
for word; do
	case $word in vhost-user,*) word=hubport,id=net0,hubid=0 ;; esac
	words+=("$word")
done
exec "${TOMBOLO_QEMU:-qemu-system-x86_64}" "${words[@]}"
"#;

#[test]
fn up_tells_of_a_vm_whose_port_stays_down() {
    let vm = "kernel = \"6.1\"\nmemory = \"256M\"\nnetworks = [\"lan\"]\n";
    let lab = Lab::new(&format!("qemu = \"./qemu\"\n[net.lan]\n[vm.a]\n{vm}"));
    common::write_program(&lab.dir.path().join("qemu"), UNPLUGGED);
    let up = lab.run(&["up"]);
    let words = String::from_utf8_lossy(&up.stderr);
    assert!(
        up.status.success() && words.contains("but its port in the network 'lan' is down; see "),
        "{words}"
    );
    assert!(lab.good(&["ps"]).contains("a (down)"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_vm_is_given_its_address_by_the_networks_dhcp() {
    let lab = Lab::new(
        "[net.lan]\ndhcp = true\n[vm.a]\nkernel = \"6.1\"\nmemory = \"256M\"\nnetworks = { lan = { address = \"dhcp\" } }\n\
         [vm.b]\nkernel = \"6.1\"\nmemory = \"256M\"\nnetworks = { lan = { address = \"10.86.0.9\" } }\n",
    );
    lab.good(&["up"]);
    let said = lab.good(&["exec", "a", "--", "ip", "-4", "-o", "addr"]);
    assert!(said.contains("inet 10.86.0.2/24"), "{said}");
    ping(&lab);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_network_that_cannot_be_had_is_named_before_anything_boots() {
    for (uplink, words) in
        [("{ interface = \"nosuch0\" }", "nosuch0"), ("{ tap = \"way-too-long-name\" }", "1 to 15 letters")]
    {
        let lab = Lab::new(&format!(
            "[net.lan]\nuplink = {uplink}\n[vm.a]\nkernel = \"6.1\"\nnetworks = [\"lan\"]\n"
        ));
        let output = lab.run(&["up"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(words), "{err}");
        assert!(!err.contains("a: starting"), "{err}");
        lab.assert_nothing_left();
    }
}

/// Echoes what comes to port 7, over IPv4 and IPv6.
const ECHO: &str = r#"
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
int main(void) {
	struct sockaddr_in6 own = { .sin6_family = AF_INET6, .sin6_port = htons(7), .sin6_addr = in6addr_any };
	int listener = socket(AF_INET6, SOCK_STREAM, 0);
	static char data[65536];
	if (bind(listener, (struct sockaddr *)&own, sizeof own) || listen(listener, 5) || daemon(0, 0))
		return 1;
	for (;;) {
		int client = accept(listener, 0, 0);
		ssize_t n;
		while ((n = read(client, data, sizeof data)) > 0 && write(client, data, n) == n)
			;
		close(client);
	}
}
"#;

/// Runs a test of this program by itself, in a network of its own that has a way out by both versions of IP.
fn alone(test: &str) {
    const NETWORK: &str = "ip link set lo up && ip link add out0 type veth peer name far0 && ip link set far0 up && ip link set out0 up &&
        ip addr add 192.0.2.2/24 dev out0 && ip route add default via 192.0.2.1 &&
        ip addr add fd00:9::2/64 dev out0 nodad && ip -6 route add default via fd00:9::1 && exec \"$0\" --exact \"$1\" --nocapture";
    let own = if rustix::process::geteuid().is_root() { "-n" } else { "-rn" };
    let mut command = Command::new("unshare");
    command.args([own, "sh", "-c", NETWORK]).arg(std::env::current_exe().unwrap()).arg(test);
    assert!(command.env(ALONE, "yes").status().unwrap().success());
}

/// Set in the network of its own.
const ALONE: &str = "TOMBOLO_TEST_ALONE";

#[test]
fn ports_of_the_host_lead_to_the_guest_over_both_versions_of_ip() {
    if std::env::var_os(ALONE).is_none() {
        return alone("ports_of_the_host_lead_to_the_guest_over_both_versions_of_ip");
    }
    let lab = Lab::new(
        "[net.out]\nuplink = \"user\"\n[vm.a]\nkernel = \"6.1\"\nmemory = \"256M\"\nnetworks = [\"out\"]\n\
         ports = [\"127.0.0.1:7001:7\", \"[::1]:7002:7\"]\n\
         [vm.b]\nkernel = \"6.1\"\nmemory = \"256M\"\nnetworks = [\"out\"]\nports = [\"127.0.0.1:7003:7\"]\n",
    );
    let (source, echo) = (lab.dir.path().join("echo.c"), lab.dir.path().join("echo"));
    std::fs::write(&source, ECHO).unwrap();
    assert!(Command::new("cc").args(["-static", "-o"]).args([&echo, &source]).status().unwrap().success());
    // A port in use is told before anything starts, for each protocol and version by itself.
    let taken = TcpListener::bind((Ipv6Addr::LOCALHOST, 7002)).unwrap();
    let refused = lab.run(&["up"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("tcp port 7002 of the host is in use"), "{words}");
    drop(taken);
    lab.good(&["up"]);
    for vm in ["a", "b"] {
        lab.good(&["cp", "echo", &format!("{vm}:/tmp/echo")]);
        lab.good(&["exec", vm, "--", "/tmp/echo"]);
    }
    wait_until("an IPv6 address", || {
        lab.good(&["exec", "a", "--", "ip", "-6", "-o", "addr", "show", "scope", "global"])
            .contains("inet6 fd00:9::")
    });
    let data: Vec<u8> = (0u32..50_000).flat_map(u32::to_le_bytes).collect();
    let addresses: [SocketAddr; 3] = [
        (Ipv4Addr::LOCALHOST, 7001).into(),
        (Ipv6Addr::LOCALHOST, 7002).into(),
        (Ipv4Addr::LOCALHOST, 7003).into(),
    ];
    for address in addresses {
        let mut back = Vec::new();
        wait_until("an answer by TCP", || {
            back.clear();
            let Ok(stream) = TcpStream::connect(address) else { return false };
            std::thread::scope(|scope| {
                let sending = scope.spawn(|| {
                    let sent = (&stream).write_all(&data);
                    sent.and_then(|()| stream.shutdown(Shutdown::Write))
                });
                let read = (&stream).read_to_end(&mut back);
                sending.join().unwrap().is_ok() && read.is_ok() && !back.is_empty()
            })
        });
        assert!(back == data, "{} of {} bytes came back from {address}", back.len(), data.len());
    }
    // A passt that doesn't run holds up no end.
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let passts: Vec<u32> = lab.processes().into_iter().filter(|pid| name(pid).starts_with("passt")).collect();
    assert_eq!(passts.len(), 2);
    passts.iter().for_each(|pid| signal(*pid, "STOP"));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_switch_outlives_its_supervisor() {
    let lab = Lab::new("[net.lan]\n[vm.a]\nkernel = \"6.1\"\nready = \"running\"\nnetworks = [\"lan\"]\n");
    lab.good(&["up"]);
    let switch = || lab.ps()["networks"][0]["pid"].clone();
    let before = switch();
    lab.kill_with_shims(&[]);
    assert_eq!(switch(), before);
    lab.good(&["up"]);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
