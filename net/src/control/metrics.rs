// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters for users and for Prometheus (text format 0.0.4).

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tombolo_control::net::{Flow, Kind, PortStatus, Querier};
use tombolo_metrics::text::{self, Text};

use crate::forwarding::switch::Switch;
use crate::ports::counters::{Counts, REASONS};
use crate::ports::port::Port;

fn flow(c: Counts) -> Flow {
    let drops =
        REASONS.iter().map(|r| (r.name().to_owned(), c.dropped_for(*r))).filter(|(_, n)| *n > 0).collect();
    let Counts { packets, bytes, flooded, copies, signals, .. } = c;
    Flow { packets, bytes, flooded, copies, signals, drops }
}

/// Returns the multicast groups that a port has joined, with their VLANs.
fn groups(port: &Port, now: u64) -> Vec<String> {
    let named =
        |(vid, group): (u16, IpAddr)| if vid == 0 { group.to_string() } else { format!("{group}@{vid}") };
    let all = port.groups.is_open(now).then(|| "all".to_owned());
    all.into_iter().chain(port.groups.list(now).into_iter().map(named)).collect()
}

/// Returns the VLANs and versions of IP with a querier, where multicast goes by groups.
#[must_use]
pub fn queriers(switch: &Switch) -> Vec<Querier> {
    let view = switch.view();
    let all = view.queriers().map(|q| q.queriers(switch.now())).unwrap_or_default();
    all.into_iter().map(|(vlan, v6)| Querier { vlan, ip: if v6 { 6 } else { 4 } }).collect()
}

/// Returns all ports at one moment.
#[must_use]
pub fn status(switch: &Switch) -> Vec<PortStatus> {
    let view = switch.view();
    let now = switch.now();
    view.ports()
        .iter()
        .map(|a| PortStatus {
            name: a.port.name().into(),
            kind: if a.uplink.is_some() { Kind::Uplink } else { Kind::Guest },
            up: a.uplink.as_ref().map_or_else(|| a.port.active_rx(0).is_some(), |uplink| uplink.is_up()),
            connected: a.uplink.as_ref().is_some_and(|uplink| uplink.is_up())
                || a.port.connected.load(Ordering::Relaxed),
            macs: a.policy.macs.clone(),
            workers: (0..a.port.pairs())
                .filter(|q| a.uplink.is_some() || a.port.is_transmitting(*q))
                .map(|q| a.port.home(q))
                .collect(),
            groups: groups(&a.port, now),
            rules: a.policy.rules.iter().map(|r| (r.to_string(), r.hits.get())).collect(),
            sent: flow(a.port.sent()),
            received: flow(a.port.received()),
        })
        .collect()
}

/// Formats the counters for Prometheus.
#[must_use]
pub fn prometheus(ports: &[PortStatus], queriers: &[Querier]) -> String {
    let mut text = Text::new("tombolo_net_");
    let mut up = text.family("port_up", text::Kind::Gauge, "1 if the port's driver receives.");
    for p in ports {
        up.sample(&[("port", &p.name)], u8::from(p.up));
    }
    let mut groups = text.family("groups", text::Kind::Gauge, "Multicast groups that a port has joined.");
    for p in ports {
        groups.sample(&[("port", &p.name)], p.groups.iter().filter(|g| *g != "all").count());
    }
    let mut heard = text.family("querier", text::Kind::Gauge, "1 where a multicast querier is heard.");
    for q in queriers {
        heard.sample(&[("vlan", &q.vlan.to_string()), ("ip", &q.ip.to_string())], 1);
    }
    let flows = || {
        ports
            .iter()
            .flat_map(|p| [("sent", &p.sent), ("received", &p.received)].map(|(way, flow)| (p, way, flow)))
    };
    type Get = fn(&Flow) -> u64;
    let counters: [(&str, &str, Get); 4] = [
        ("packets_total", "Frames, by the port's own direction.", |f| f.packets),
        ("bytes_total", "Bytes of frames.", |f| f.bytes),
        ("copies_total", "What frames became beyond themselves, by flooding and segmentation.", |f| f.copies),
        ("interrupts_total", "Interrupts sent to the guest.", |f| f.signals),
    ];
    for (name, help, get) in counters {
        let mut family = text.family(name, text::Kind::Counter, help);
        for (p, direction, flow) in flows() {
            family.sample(&[("port", &p.name), ("direction", direction)], get(flow));
        }
    }
    let mut drops = text.family("drops_total", text::Kind::Counter, "Frames lost, by reason.");
    for (p, direction, flow) in flows() {
        for (reason, n) in &flow.drops {
            drops.sample(&[("port", &p.name), ("direction", direction), ("reason", reason)], n);
        }
    }
    let help = "Frames that a port's rule decided about.";
    let mut rules = text.family("rule_frames_total", text::Kind::Counter, help);
    for p in ports {
        for (n, (rule, hits)) in p.rules.iter().enumerate() {
            rules.sample(&[("port", &p.name), ("number", &n.to_string()), ("rule", rule)], hits);
        }
    }
    text.finish()
}

/// Answers HTTP requests with the counters until `server` is stopped.
pub fn serve(server: &tombolo_metrics::Server, switch: &Arc<Switch>) {
    if let Err(err) = server.serve("counters", || prometheus(&status(switch), &queriers(switch))) {
        tracing::error!("metrics ended: {err}");
    }
}
