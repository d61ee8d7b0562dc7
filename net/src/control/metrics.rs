// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters for people and for Prometheus (text format 0.0.4).

use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;

use crate::forwarding::switch::Switch;
use crate::ports::counters::{Counts, REASONS};
use crate::ports::port::Port;

/// One direction of a port.
#[derive(Clone, Debug, Serialize)]
pub struct Flow {
    /// Frames.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
    /// Of the frames, those to several receivers.
    pub flooded: u64,
    /// What the frames became beyond themselves, by flooding and segmentation.
    pub copies: u64,
    /// Interrupts sent.
    pub signals: u64,
    /// Frames lost, by reason; reasons that never were are left out.
    pub drops: std::collections::BTreeMap<&'static str, u64>,
}

impl From<Counts> for Flow {
    fn from(c: Counts) -> Self {
        let drops = REASONS.iter().map(|r| (r.name(), c.dropped_for(*r))).filter(|(_, n)| *n > 0).collect();
        let Counts { packets, bytes, flooded, copies, signals, .. } = c;
        Self { packets, bytes, flooded, copies, signals, drops }
    }
}

/// A multicast querier that is heard.
#[derive(Clone, Debug, Serialize)]
pub struct Querier {
    /// On this VLAN; 0: none.
    pub vlan: u16,
    /// For this version of IP.
    pub ip: u8,
}

/// A port at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// `guest` or `uplink`.
    pub kind: &'static str,
    /// A front-end is connected and its driver receives.
    pub up: bool,
    /// A front-end is connected.
    pub connected: bool,
    /// The MACs that it owns.
    pub macs: Vec<crate::frames::frame::Mac>,
    /// Which worker carries what it sends, by queue in use.
    pub workers: Vec<usize>,
    /// The multicast groups that it has joined; `all` if it gets what is for any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Its rules, each with the frames that it decided about.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<(String, u64)>,
    /// From the guest into the switch.
    pub sent: Flow,
    /// From the switch to the guest.
    pub received: Flow,
}

/// The multicast groups that a port has joined, with their VLANs.
fn groups(port: &Port, now: u64) -> Vec<String> {
    let named =
        |(vid, group): (u16, IpAddr)| if vid == 0 { group.to_string() } else { format!("{group}@{vid}") };
    let all = port.groups.is_open(now).then(|| "all".to_owned());
    all.into_iter().chain(port.groups.list(now).into_iter().map(named)).collect()
}

/// Where multicast goes by groups: the VLANs and versions of IP for which a querier is heard.
#[must_use]
pub fn queriers(switch: &Switch) -> Vec<Querier> {
    let view = switch.view();
    let all = view.queriers().map(|q| q.queriers(switch.now())).unwrap_or_default();
    all.into_iter().map(|(vlan, v6)| Querier { vlan, ip: if v6 { 6 } else { 4 } }).collect()
}

/// All ports at one moment.
#[must_use]
pub fn status(switch: &Switch) -> Vec<PortStatus> {
    let view = switch.view();
    let now = switch.now();
    view.ports()
        .iter()
        .map(|a| PortStatus {
            name: a.port.name().into(),
            kind: if a.uplink.is_some() { "uplink" } else { "guest" },
            up: a.uplink.is_some() || a.port.active_rx(0).is_some(),
            connected: a.uplink.is_some() || a.port.connected.load(Ordering::Relaxed),
            macs: a.policy.macs.clone(),
            workers: (0..a.port.pairs())
                .filter(|q| a.uplink.is_some() || a.port.is_transmitting(*q))
                .map(|q| a.port.home(q))
                .collect(),
            groups: groups(&a.port, now),
            rules: a.policy.rules.iter().map(|r| (r.to_string(), r.hits.get())).collect(),
            sent: a.port.sent().into(),
            received: a.port.received().into(),
        })
        .collect()
}

/// The counters as Prometheus reads them.
#[must_use]
pub fn prometheus(ports: &[PortStatus], queriers: &[Querier]) -> String {
    let mut out = String::new();
    let label = |s: &str| s.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut family = |name: &str, kind: &str, help: &str, lines: &mut dyn FnMut(&mut String)| {
        let _infallible = writeln!(out, "# HELP tombolo_net_{name} {help}\n# TYPE tombolo_net_{name} {kind}");
        lines(&mut out);
    };
    family("port_up", "gauge", "1 if the port's driver receives.", &mut |out| {
        for p in ports {
            let _infallible =
                writeln!(out, "tombolo_net_port_up{{port=\"{}\"}} {}", label(&p.name), u8::from(p.up));
        }
    });
    family("groups", "gauge", "Multicast groups that a port has joined.", &mut |out| {
        for p in ports {
            let (port, n) = (label(&p.name), p.groups.iter().filter(|g| *g != "all").count());
            let _infallible = writeln!(out, "tombolo_net_groups{{port=\"{port}\"}} {n}");
        }
    });
    family("querier", "gauge", "1 where a multicast querier is heard.", &mut |out| {
        for q in queriers {
            let _infallible = writeln!(out, "tombolo_net_querier{{vlan=\"{}\",ip=\"{}\"}} 1", q.vlan, q.ip);
        }
    });
    type Get = fn(&Flow) -> u64;
    let counters: [(&str, &str, Get); 4] = [
        ("packets_total", "Frames, by the port's own direction.", |f| f.packets),
        ("bytes_total", "Bytes of frames.", |f| f.bytes),
        ("copies_total", "What frames became beyond themselves, by flooding and segmentation.", |f| f.copies),
        ("interrupts_total", "Interrupts sent to the guest.", |f| f.signals),
    ];
    for (name, help, get) in counters {
        family(name, "counter", help, &mut |out| {
            for p in ports {
                for (direction, flow) in [("sent", &p.sent), ("received", &p.received)] {
                    let (port, n) = (label(&p.name), get(flow));
                    let _infallible =
                        writeln!(out, "tombolo_net_{name}{{port=\"{port}\",direction=\"{direction}\"}} {n}");
                }
            }
        });
    }
    family("drops_total", "counter", "Frames lost, by reason.", &mut |out| {
        for p in ports {
            for (direction, flow) in [("sent", &p.sent), ("received", &p.received)] {
                for (reason, n) in &flow.drops {
                    let port = label(&p.name);
                    let _infallible = writeln!(
                        out,
                        "tombolo_net_drops_total{{port=\"{port}\",direction=\"{direction}\",reason=\"{reason}\"}} {n}"
                    );
                }
            }
        }
    });
    family("rule_frames_total", "counter", "Frames that a port's rule decided about.", &mut |out| {
        for p in ports {
            for (n, (rule, hits)) in p.rules.iter().enumerate() {
                let (port, rule) = (label(&p.name), label(rule));
                let _infallible = writeln!(
                    out,
                    "tombolo_net_rule_frames_total{{port=\"{port}\",number=\"{n}\",rule=\"{rule}\"}} {hits}"
                );
            }
        }
    });
    out
}

/// Answers HTTP requests with the counters until `server` is stopped.
pub fn serve(server: &tombolo_metrics::Server, switch: &Arc<Switch>) {
    if let Err(err) = server.serve("counters", || prometheus(&status(switch), &queriers(switch))) {
        tracing::error!("metrics ended: {err}");
    }
}
