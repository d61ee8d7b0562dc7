// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tenants for Prometheus (text format 0.0.4).

use crate::tenants::{Status, Tenants};
use tombolo_calls::say;
use tombolo_metrics::text::{Kind, Text};

type Get = fn(&Status) -> f64;

/// Name, kind, help, and where it comes from.
const FAMILIES: &[(&str, Kind, &str, Get)] = &[
    ("calls_total", Kind::Counter, "Requests of a tenant.", |t| t.calls as f64),
    ("waits_total", Kind::Counter, "Requests whose result the tenant waited for.", |t| t.waits as f64),
    ("record_bytes_total", Kind::Counter, "Bytes in records.", |t| t.bytes as f64),
    ("busy_seconds_total", Kind::Counter, "From requests that were waited for to their replies.", |t| {
        t.busy_seconds
    }),
    ("held_seconds_total", Kind::Counter, "For which requests were held back by the tenant's rate.", |t| {
        t.held_seconds
    }),
    (
        "cpu_seconds_total",
        Kind::Counter,
        "Processor time of the tenant's worker, and with a control group of what it started.",
        |t| t.cpu_seconds,
    ),
    ("memory_bytes", Kind::Gauge, "Device memory in use.", |t| t.memory as f64),
    ("memory_limit_bytes", Kind::Gauge, "Device memory that may be used.", |t| t.memory_limit as f64),
    ("objects", Kind::Gauge, "Objects that live.", |t| t.objects as f64),
    ("weight", Kind::Gauge, "Share of time beside other tenants.", |t| f64::from(t.weight)),
];

/// The figures as Prometheus reads them.
pub fn prometheus(tenants: &[Status]) -> String {
    let mut text = Text::new("tombolo_accel_");
    text.family("tenants", Kind::Gauge, "Clients that are served.").sample(&[], tenants.len());
    for (name, kind, help, get) in FAMILIES {
        let mut family = text.family(name, *kind, help);
        for t in tenants {
            family.sample(&[("pid", &t.pid.to_string()), ("name", &t.name), ("via", &t.via)], get(t));
        }
    }
    text.finish()
}

/// Answers HTTP requests.
pub fn serve(server: &tombolo_metrics::Server, tenants: &Tenants) {
    if let Err(err) = server.serve("figures", || prometheus(&tenants.status())) {
        say!("tombolo accel: metrics ended: {err}");
    }
}
